"""The GPU side: a controller per host and the warm worker processes that it owns."""
