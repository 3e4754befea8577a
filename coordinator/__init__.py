"""The coordinator: assigns waiting requests to workers. CPU only; imports no torch, no vllm."""
