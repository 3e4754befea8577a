"""Positions in a stream, integers and JSON in Redis values, and the server's time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

#: Characters of an entry's id: two numbers of 64 bits.
_LONGEST: Final = 41

#: What decoders raise for a value that is not of their type.
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: Clients may choose the ids of entries; one of this time or later (ms; the year 2286) is no time.
FAR_FUTURE_MS: Final = 10**13


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


def digits(value: bytes | None, most: int = 9) -> int | None:
    """The number that at most so many digits are; None for anything else."""
    return int(value) if value and len(value) <= most and value.isdigit() else None


def decoded(raw: bytes | str, decode: Callable[[bytes | str], T]) -> T | None:
    """What an untrusted value says; None where this version cannot read it."""
    try:
        return decode(raw)
    except _UNREADABLE:
        return None


def readable(
    values: Mapping[bytes, bytes], decode: Callable[[bytes], T]
) -> Iterator[tuple[str, T]]:
    """The fields of a hash and their values, without those that this version cannot read."""
    for name, packed in values.items():
        with contextlib.suppress(*_UNREADABLE):
            yield name.decode(), decode(packed)


def unix_ms(answer: Any) -> int:
    """The answer to TIME, seconds and microseconds, as unix ms."""
    seconds, micros = answer
    return int(seconds) * 1000 + int(micros) // 1000
