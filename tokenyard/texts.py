"""What people read on a terminal: times in short, and names that somebody else has chosen."""

from __future__ import annotations

import json


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
    """With control characters and the like as Python writes them, so that they move no cursor.

    For a value that somebody else has chosen: it stays on one line.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def harmless(text: str) -> str:
    """`printable` for whole texts of several lines: what goes to a terminal or into a log."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else _escaped(one) for one in text)


def harmless_json(text: str) -> str:
    """The same for JSON, which means what it meant before."""
    if text.isascii():
        return text
    return "".join(
        one if one.isprintable() or one.isascii() else json.dumps(one)[1:-1] for one in text
    )


def indented(text: str) -> str:
    """A value of several lines, each `printable`; none but the first begins where a line begins."""
    return "\n  ".join(map(printable, text.splitlines()))


def _escaped(one: str) -> str:
    return one.encode("unicode_escape", errors="surrogatepass").decode()
