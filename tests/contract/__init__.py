"""Suites that every implementation of a seam must pass."""
