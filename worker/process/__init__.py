"""One worker process: reads its lane, steps its engine, publishes."""
