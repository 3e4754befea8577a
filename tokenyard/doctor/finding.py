"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``unknown``: this broker or user does not allow the check.
Verdict = Literal["ok", "warning", "fault", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    name: str
    verdict: Verdict
    found: str
    todo: str = ""  # the remedy, if there is something to do


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, todo: str) -> Finding:
    """It works, but something should be done."""
    return Finding(name, "warning", found, todo)


def fault(name: str, found: str, todo: str) -> Finding:
    """Something does not work, or accepted requests can be lost."""
    return Finding(name, "fault", found, todo)


def unknown(name: str, found: str, todo: str = "") -> Finding:
    """It cannot be checked."""
    return Finding(name, "unknown", found, todo)
