"""Text for terminals and logs: escaping of untrusted values, short times, counts, suggestions."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

_UNITS_MS: Final = {"": 1000, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SPAN: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s?(ms|s|m|h|d|)")


def span(ms: float) -> str:
    """A time in at most five characters."""
    seconds = max(0.0, ms) / 1000
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def span_ms(text: str) -> int:
    """The ms in ``90``, ``90s``, ``5m``, ``2h`` or ``1d``; raises `ValueError`."""
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r}: give a time like 90, 90s, 5m, 2h or 1d")
    return round(float(found[1]) * _UNITS_MS[found[2]])


def byte_size(count: float) -> str:
    """Bytes in at most eight characters: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def local_time(unix_s: float, timespec: str = "seconds") -> str:
    """A time by this host's clock and zone: ``2026-11-22 02:00:00+01:00``."""
    at = datetime.datetime.fromtimestamp(unix_s, datetime.UTC).astimezone()
    return at.isoformat(sep=" ", timespec=timespec)


def printable(text: str) -> str:
    """An untrusted value in one line, with control characters escaped as in Python."""
    return _escape(text, _escaped)


def harmless(text: str) -> str:
    """`printable` for texts of several lines."""
    return _escape(text, _escaped, keep="\n\t")


def harmless_json(text: str) -> str:
    """`harmless` for JSON, whose meaning does not change."""
    return _escape(text, _escaped_in_json, keep="\n\t")


def _escape(text: str, escaped: Callable[[str], str], keep: str = "") -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else escaped(one) for one in text)


def indented(text: str) -> str:
    """A value of several lines, each `printable`; all but the first are indented."""
    return "\n  ".join(map(printable, text.splitlines()))


def cut(text: str, most: int) -> str:
    """The beginning of a text, with its length where something is left out."""
    if len(text) <= most:
        return text
    return f"{text[:most]} … ({len(text):,} characters)"


def counted(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], most: int = 10) -> str:
    """``a, b and 3 more``: the first names, each `printable`, and how many are left out."""
    left_out = len(names) - most
    more = f" and {left_out:,} more" if left_out > 0 else ""
    return ", ".join(map(printable, names[:most])) + more


def pip_install(extras: str) -> str:
    """How to install extras, e.g. ``cli,worker``: by path, since no registry has the package."""
    return f"pip install 'PATH[{extras}]', where PATH is the wheel or the checkout of Tokenyard"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean temperature?`` where a known name is similar, else ""."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The most similar known name, of at least this likeness; else ""."""
    by_form = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_form, 1, likeness)
    return by_form[near[0]] if near else ""


def _escaped(one: str) -> str:
    return one.encode("unicode_escape", errors="surrogatepass").decode()


def _escaped_in_json(one: str) -> str:
    units = one.encode("utf-16-be", errors="surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
