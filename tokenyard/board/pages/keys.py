"""Keys of the gateway and the board: list, create, revoke."""

from __future__ import annotations

from typing import Any, Final

from tokenyard.board.page import Parameters
from tokenyard.board.paging import numbered_page
from tokenyard.ops.keys import list_keys
from tokenyard.protocol.yard import Yard

#: Keys on one page.
PER_PAGE: Final = 100


def view_keys(yard: Yard, given: Parameters) -> dict[str, Any]:
    """All keys, or those of a tenant."""
    tenant = given.text("tenant")
    everything = list_keys(yard)
    found = [one for one in everything.items() if tenant in {"", one[1].tenant}]
    found.reverse()  # the newest first
    page = numbered_page(given, len(found), PER_PAGE, "/keys", tenant=tenant)
    return {
        "tenant": tenant,
        "found": found[page.first : page.end],
        "total": len(found),
        "numbered": page,
    }
