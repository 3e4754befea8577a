"""Times in short, and names that move no cursor."""

from __future__ import annotations

import pytest

from tokenyard.protocol.texts import counted, did_you_mean, nearest, printable, span


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


def test_counted_and_similar_words() -> None:
    assert [counted(number, "worker") for number in (0, 1, 2)] == [
        "0 workers",
        "1 worker",
        "2 workers",
    ]
    assert did_you_mean("temprature", ["top_p", "temperature"]) == "; did you mean temperature?"
    assert did_you_mean("zzz", ["top_p"]) == ""
    assert nearest("SEED", ["seed"]) == "seed"
