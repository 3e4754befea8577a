"""Pages that are a list and nothing else: the audit, and keys of the gateway and the board."""

from __future__ import annotations

from typing import Any, Final

from tokenyard.board.page import Parameters, numbered_page
from tokenyard.ops.audit import MAX_ENTRIES, read_audit
from tokenyard.ops.keys import list_keys
from tokenyard.protocol.keys import Yard

#: Entries of the audit, and keys, on one page.
_ENTRIES: Final = 50
_KEYS: Final = 100


def view_audit(yard: Yard, given: Parameters) -> dict[str, Any]:
    """What operators have done, a part of it."""
    before = given.text("before")
    found = read_audit(yard, _ENTRIES + 1, before)
    shown = found[:_ENTRIES]
    return {
        "entries": shown,
        "is_newest": not before,
        "before": shown[-1].entry if len(found) > _ENTRIES else "",
        "most": MAX_ENTRIES,
    }


def view_keys(yard: Yard, given: Parameters) -> dict[str, Any]:
    """All keys, or those of a tenant."""
    tenant = given.text("tenant")
    everything = list_keys(yard)
    found = [one for one in everything.items() if tenant in {"", one[1].tenant}]
    found.reverse()  # the newest first
    page = numbered_page(given, len(found), _KEYS, "/keys", tenant=tenant)
    return {
        "tenant": tenant,
        "found": found[page.first : page.end],
        "total": len(found),
        "numbered": page,
    }
