"""Measures tokens per second and latency, compared with vLLM's own ways to serve."""
