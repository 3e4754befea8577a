"""What the coordinator counts and reports, and how Prometheus reads it."""
