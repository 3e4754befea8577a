"""The HTTP gateway: vLLM's OpenAI-compatible front end over a yard's queue."""
