"""What people read on a terminal: times in short, and names that somebody else has chosen."""

from __future__ import annotations


def span(ms: float) -> str:
    """A time in at most five characters."""
    seconds = max(0.0, ms) / 1000
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in ((60, "s"), (3600, "m"), (86400, "h")):
        if seconds < size:
            return f"{seconds / (size / 60 if unit != 'h' else 3600):.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def printable(text: str) -> str:
    """With control characters and the like as Python writes them, so that they move no cursor."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )
