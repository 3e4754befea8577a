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
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else _escaped_in_json(one) for one in text
    )


def indented(text: str) -> str:
    """A value of several lines, each `printable`; none but the first begins where a line begins."""
    return "\n  ".join(map(printable, text.splitlines()))


def _escaped(one: str) -> str:
    return one.encode("unicode_escape", errors="surrogatepass").decode()


def _escaped_in_json(one: str) -> str:
    units = one.encode("utf-16-be", errors="surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
