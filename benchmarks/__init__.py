"""Benchmarks, one file per question; README.md has the method and the latest tables."""
