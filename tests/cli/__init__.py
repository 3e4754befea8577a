"""Tests of the command line, the embedded broker, and the processes that they start."""
