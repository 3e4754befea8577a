"""Which worker gets the next request: policies, and what they know of lanes and prefixes."""
