"""Small things that messages have in common: numbers of things, and what may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean temperature?`` where a known name is near, else nothing."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known name that looks most like ``name``, at least so much; "" where none does."""
    by_form = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_form, 1, likeness)
    return by_form[near[0]] if near else ""
