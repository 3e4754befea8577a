"""Positions in a stream, and integers in Redis values."""

from __future__ import annotations

from typing import Final

#: Characters of an entry's id: two numbers of 64 bits.
_LONGEST: Final = 41


def position(entry: str) -> tuple[int, int]:
    """A stream entry's position: unix time in ms, and the number within that.

    Text that is not an entry id sorts before all.
    """
    ms, _, count = entry.partition("-")
    is_place = ms.isdecimal() and count.isdecimal() and len(entry) <= _LONGEST
    return (int(ms), int(count)) if is_place else (0, 0)


def whole(value: bytes | str | None) -> int:
    """The integer in a Redis value; 0 where it has none."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value or ""
    digits = text.removeprefix("-")
    return int(text) if digits.isdecimal() and digits.isascii() and len(digits) < 20 else 0
