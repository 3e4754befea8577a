"""The tests of Tokenyard: CONTRIBUTING.md says how to run which of them."""
