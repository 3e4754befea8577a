"""Measures the gateway, compared with vLLM's own server."""
