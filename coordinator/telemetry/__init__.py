"""What the coordinator counts and traces, and how Prometheus reads it."""
