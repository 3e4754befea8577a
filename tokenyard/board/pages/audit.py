"""The audit: what operators have done, with who and why."""

from __future__ import annotations

from typing import Any, Final

from tokenyard.board.page import Parameters
from tokenyard.ops.audit import MAX_ENTRIES, read_audit
from tokenyard.protocol.yard import Yard

_ON_A_PAGE: Final = 50


def view_audit(yard: Yard, given: Parameters) -> dict[str, Any]:
    """What operators have done, a part of it."""
    before = given.text("before")
    found = read_audit(yard, _ON_A_PAGE + 1, before)
    shown = found[:_ON_A_PAGE]
    return {
        "entries": shown,
        "is_newest": not before,
        "before": shown[-1].entry if len(found) > _ON_A_PAGE else "",
        "most": MAX_ENTRIES,
    }
