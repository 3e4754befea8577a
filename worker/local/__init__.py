"""Engines of a program, without Redis."""
