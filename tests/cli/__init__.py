"""The command line, the embedded broker, and what they start."""
