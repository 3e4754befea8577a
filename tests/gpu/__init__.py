"""What only a device can show; with TOKENYARD_TEST_DEVICE=cpu rehearsed on vLLM's CPU backend."""
