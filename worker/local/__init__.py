"""Engines in one's own program, without Redis."""
