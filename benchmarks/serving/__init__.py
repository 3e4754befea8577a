"""Tokens a second and latency, against vLLM's own ways to serve."""
