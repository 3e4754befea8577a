"""Places in a stream."""

from __future__ import annotations


def position(entry: str) -> tuple[int, int]:
    """A stream entry's place in its stream: unix time in ms, and the number within that."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence)
