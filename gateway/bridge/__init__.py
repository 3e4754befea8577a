"""The bridge: the engine of an unmodified vLLM front end, which is really the queue."""
