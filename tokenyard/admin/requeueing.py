"""Failed requests and the dead letters from which they can run again.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import redis

from tokenyard.admin.letter_lists import LetterFilter, LetterHead, all_heads
from tokenyard.admin.listed import Listed, Owned, accepted_ms, by_ledger
from tokenyard.admin.requests import Query
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.streams import unix_ms

#: A letter is written in the call that ends its request, so both have nearly the same time.
_BEFORE_MS: Final = 2
_AFTER_MS: Final = 100
_IN_THE_WAY: Final = {
    "waiting": "waits already",
    "assigned": "runs already",
    "completed": "has completed",
    "cancelled": "was cancelled; submit it again under another id",
    "expired": "has expired; submit it again under another id",
    "failed": "failed without a dead letter, so it was not kept: submit it again under another id",
    "": "is not known here, and not a dead letter",
}


def what_is_in_the_way(state: str) -> str:
    """Why a request without a letter cannot be requeued, by its state, after its name."""
    return _IN_THE_WAY.get(state, "cannot be requeued now")


def letter_of(
    connection: redis.Redis, keys: Keys, client: str, request_id: str, ended_ms: int
) -> LetterHead | None:
    """The letter of a request that ended at this time; None if it has none, or not any more."""
    return letters_of(connection, keys, {(client, request_id): ended_ms}).get((client, request_id))


def letters_of(
    connection: redis.Redis, keys: Keys, ended_ms: Mapping[Owned, int]
) -> dict[Owned, LetterHead]:
    """The letters of requests that ended at these times, by client and id."""
    times = [at_ms for at_ms in ended_ms.values() if at_ms > 0]
    if not times:
        return {}
    since_ms, until_ms = max(0, min(times) - _BEFORE_MS), max(times) + _AFTER_MS
    found: dict[Owned, LetterHead] = {}
    for piece in all_heads(
        connection, keys, LetterFilter(since_ms=since_ms, until_ms=until_ms), ""
    ):
        found |= {_owner(one): one for one in piece if _owner(one) in ended_ms}
        if len(found) == len(ended_ms):
            break
    return found


def matching_letters(
    connection: redis.Redis, keys: Keys, query: Query, most: int
) -> tuple[list[LetterHead], bool]:
    """The letters whose requests fit a query, the oldest first; whether there are more."""
    if "failed" not in query.states:
        return [], False
    now_ms = unix_ms(connection.time())
    wanted = LetterFilter(
        model=query.model,
        client=query.client,
        tenant=query.tenant,
        since_ms=max(0, now_ms - query.newer_ms) if query.newer_ms else 0,
    )
    found: dict[Owned, LetterHead] = {}
    for piece in all_heads(connection, keys, wanted, ""):
        listed = list(_with_workers(connection, keys, query, piece))
        fitting = (head for head, one in zip(piece, listed, strict=True) if query.fits(now_ms, one))
        found |= {_owner(head): head for head in fitting if head.is_answerable}
        if len(found) > most:
            return list(found.values())[:most], True
    return list(found.values()), False


def _with_workers(
    connection: redis.Redis, keys: Keys, query: Query, heads: Sequence[LetterHead]
) -> Iterator[Listed]:
    """The requests of letters; only their ledgers know their workers."""
    workers: dict[Owned, str] = {}
    if query.worker:
        known = by_ledger(connection, keys, map(_owner, heads))
        workers = {(one.client, one.id): one.worker for one in known}
    for head in heads:
        yield msgspec.structs.replace(_listed(head), worker=workers.get(_owner(head), ""))


def _listed(head: LetterHead) -> Listed:
    error, _, message = head.reason.partition(": ")
    return Listed(
        client=head.client,
        id=head.id,
        state="failed",
        model=head.model,
        tenant=head.tenant,
        server_id=head.server_id,
        accepted_ms=accepted_ms(head.server_id),
        ended_ms=head.died_ms,
        error=error,
        message=message,
    )


def _owner(head: LetterHead) -> Owned:
    return head.client, head.id
