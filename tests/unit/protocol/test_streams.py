"""Places in a stream, and numbers, as Redis or a client may have written them."""

from __future__ import annotations

import pytest

from tokenyard.protocol.streams import digits, position, whole


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ("1-2", (1, 2)),
        ("18446744073709551615-18446744073709551615", (2**64 - 1, 2**64 - 1)),
        ("", (0, 0)),
        ("1", (0, 0)),
        ("a-1", (0, 0)),
        ("-1-1", (0, 0)),
        ("9" * 5000 + "-1", (0, 0)),
    ],
)
def test_position(entry: str, place: tuple[int, int]) -> None:
    assert position(entry) == place


@pytest.mark.parametrize(
    ("value", "number"),
    [(None, 0), (b"12", 12), (b"-3", -3), ("4", 4), (b"\xff", 0), (b"1.5", 0), (b"9" * 5000, 0)],
)
def test_whole(value: bytes | str | None, number: int) -> None:
    assert whole(value) == number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (None, None),
        (b"", None),
        (b"0", 0),
        (b"999999999", 999_999_999),
        *((odd, None) for odd in (b"1000000000", b"-1", b"1.5", b"x", b"\xb2", b"9" * 5000)),
    ],
)
def test_digits(value: bytes | None, number: int | None) -> None:
    assert digits(value) == number
