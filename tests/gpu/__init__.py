"""Tests that need a device; TOKENYARD_TEST_DEVICE=cpu rehearses them on vLLM's CPU backend."""
