"""vLLM's HTTP front end, with the queue in the place of its engine."""
