"""Measures how soon a model answers, compared with `vllm serve` and `LLM`."""
