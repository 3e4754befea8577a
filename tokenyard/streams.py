"""Places in a stream."""

from __future__ import annotations


def position(entry: str) -> tuple[int, int]:
    """A stream entry's place in its stream: unix time in ms, and the number within that.

    What is no entry's id stands before all.
    """
    ms, _, count = entry.partition("-")
    return (int(ms), int(count)) if ms.isdecimal() and count.isdecimal() else (0, 0)
