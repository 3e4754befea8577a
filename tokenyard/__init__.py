"""Tokenyard: a durable job queue for LLM inference on Redis Streams."""

__version__ = "0.1.0"
