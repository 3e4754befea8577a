"""How soon a model answers, against `vllm serve` and `LLM`."""
