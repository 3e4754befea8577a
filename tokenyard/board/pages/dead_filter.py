"""The filter of dead letters, in a form and in words."""

from __future__ import annotations

import datetime
from typing import Final

from tokenyard.admin.letter_lists import CODES, NO_CODE, LetterFilter
from tokenyard.board.cutting import cut
from tokenyard.board.yard import BadInput, Parameters

#: The reasons to choose from.
REASONS: Final = (*CODES, NO_CODE)
#: The fields of the form.
FILTERS: Final = ("reason", "model", "client", "tenant", "text", "since", "until")
_MOST: Final = 120


def wanted_letters(given: Parameters) -> LetterFilter:
    """The filter of a form; raises `BadInput`."""
    return LetterFilter(
        code=given.one_of("reason", ("", *REASONS), ""),
        model=given.text("model"),
        client=given.text("client"),
        tenant=given.text("tenant"),
        text=given.text("text"),
        since_ms=_time(given, "since"),
        until_ms=_time(given, "until"),
    )


def _time(given: Parameters, name: str) -> int:
    """A time, in UTC unless it has an offset, as unix ms; 0 for none. Raises `BadInput`."""
    text = given.text(name)
    if not text:
        return 0
    try:
        at = datetime.datetime.fromisoformat(text)
        at = at if at.tzinfo else at.replace(tzinfo=datetime.UTC)
        return max(1, int(at.timestamp() * 1000))
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{name}: give a time in UTC like 2026-11-23T06:15") from error


def words_of(given: Parameters) -> str:
    """The filter of a form in words."""
    named = ((name, cut(given.text(name), _MOST)) for name in FILTERS if given.text(name))
    return ", ".join(f"{name} {text}" for name, text in named)
