"""Whose request an id is. Errors of redis-py pass, for `tokenyard.broker.connection.translated`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import redis

from tokenyard.admin.requests import Budget, find_waiting, scan_ledgers
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.wire import DEFAULT_CLIENT

#: Keys that are looked at for an id; some seconds on a server that does nothing else.
MOST_KEYS: Final = 1_000_000
#: Entries of intakes that are looked at for one that came by XADD and is known by nothing else.
MOST_ENTRIES: Final = 2_000


@dataclass(frozen=True, slots=True)
class Owners:
    """The clients that have a request of this id."""

    clients: list[str]  # by name
    is_whole: bool = True  # False: there are more keys than were looked at


def find_owners(
    connection: redis.Redis,
    keys: Keys,
    request_id: str,
    *,
    most_keys: int = MOST_KEYS,
    most_entries: int = MOST_ENTRIES,
) -> Owners:
    """Look for the clients of an id: `anon` before all others, then by SCAN, then what waits.

    An id that `anon` has is taken for its own, so that a request by plain XADD needs no search.
    """
    run: Any = connection
    if run.exists(keys.ledger(DEFAULT_CLIENT, request_id)):
        return Owners([DEFAULT_CLIENT])
    budget, found = Budget(most_keys), set[str]()
    for page in scan_ledgers(connection, keys, budget, request_id=request_id):
        found |= {client for client, _ in page}
    if budget.is_spent:
        return Owners(sorted(found), is_whole=False)
    if not found:
        waiting = find_waiting(connection, keys, lambda one: one.id == request_id, most_entries)
        found = {one.client for one in waiting}
    return Owners(sorted(found))
