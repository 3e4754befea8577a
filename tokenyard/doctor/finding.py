"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``unknown``: this broker or this user does not let us see it, which is no fault of theirs.
Verdict = Literal["ok", "warning", "fault", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    todo: str = ""  # what to do, where something is to be done


def ok(name: str, found: str) -> Finding:
    """Nothing has to be done."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, todo: str) -> Finding:
    """It works, but something should be done."""
    return Finding(name, "warning", found, todo)


def fault(name: str, found: str, todo: str) -> Finding:
    """Something does not work, or what was accepted can be lost."""
    return Finding(name, "fault", found, todo)


def unknown(name: str, found: str, todo: str = "") -> Finding:
    """It cannot be seen."""
    return Finding(name, "unknown", found, todo)
