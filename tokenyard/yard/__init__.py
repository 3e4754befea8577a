"""What is so in a yard, one file a noun: every fact is read here, and nothing is changed."""
