"""Which worker gets the next request: policies, and their view of lanes and prefixes."""
