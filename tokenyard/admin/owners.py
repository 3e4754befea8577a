"""Finds the clients of a request id.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tokenyard.admin.requests import find_waiting
from tokenyard.admin.searching import Budget, LedgerSearch
from tokenyard.protocol.wire import DEFAULT_CLIENT
from tokenyard.protocol.yard import Yard

#: Keys to scan for an id; some seconds on an idle server.
MOST_KEYS: Final = 1_000_000
#: Entries of intakes to read for a request by plain XADD, which has no ledger yet.
MOST_ENTRIES: Final = 2_000


@dataclass(frozen=True, slots=True)
class Owners:
    """The clients that have a request with an id."""

    clients: list[str]  # by name
    is_whole: bool = True  # False: the scan ended at its limit


def find_owners(
    yard: Yard,
    request_id: str,
    *,
    most_keys: int = MOST_KEYS,
    most_entries: int = MOST_ENTRIES,
) -> Owners:
    """Find the clients of an id: first `anon`, then by SCAN, then among the waiting requests.

    If `anon` has the id, no other client is searched.
    """
    run: Any = yard.connection
    if run.exists(yard.keys.ledger(DEFAULT_CLIENT, request_id)):
        return Owners([DEFAULT_CLIENT])
    budget, found = Budget(most_keys), set[str]()
    for page in LedgerSearch(yard, budget, request_id=request_id).pages():
        found |= {client for client, _ in page}
    if budget.is_spent:
        return Owners(sorted(found), is_whole=False)
    if not found:
        waiting = find_waiting(yard, lambda one: one.id == request_id, most_entries)
        found = {one.client for one in waiting}
    return Owners(sorted(found))
