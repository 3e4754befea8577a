"""What crosses a process boundary: keys, requests, replies, control signals, settings, errors."""
