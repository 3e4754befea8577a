"""Times in short, and names that move no cursor."""

from __future__ import annotations

import pytest

from tokenyard.protocol.texts import printable, span


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0.0 s"),
        (9_940, "9.9 s"),
        (59_000, "59 s"),
        (60_000, "1 m"),
        (7_200_000, "2 h"),
        (86_400_000, "1 d"),
        (864_000_000, "10 d"),
    ],
)
def test_spans(ms: int, text: str) -> None:
    assert span(ms) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("adder é 数", "adder é 数"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202e", "\\u202e"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
