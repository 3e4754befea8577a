"""Failed requests and the dead letters from which they can run again.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenyard import clock
from tokenyard.admin.letter_lists import LetterFilter, LetterHead, all_heads
from tokenyard.admin.listed import Listed, Owned, accepted_ms, by_ledger
from tokenyard.admin.requests import Query
from tokenyard.protocol.streams import unix_ms
from tokenyard.protocol.yard import Yard

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


@dataclass(frozen=True, slots=True)
class MatchingLetters:
    """The letters whose requests fit a query."""

    heads: Sequence[LetterHead]
    has_more: bool = False  # than were wanted
    is_whole: bool = True  # False: the time was over, and there may be more


def what_is_in_the_way(state: str) -> str:
    """Why a request without a letter cannot be requeued, by its state, after its name."""
    return _IN_THE_WAY.get(state, "cannot be requeued now")


def letter_of(yard: Yard, client: str, request_id: str, ended_ms: int) -> LetterHead | None:
    """The letter of a request that ended at this time; None if it has none, or not any more."""
    return letters_of(yard, {(client, request_id): ended_ms}).get((client, request_id))


def letters_of(yard: Yard, ended_ms: Mapping[Owned, int]) -> dict[Owned, LetterHead]:
    """The letters of requests that ended at these times, by client and id."""
    found: dict[Owned, LetterHead] = {}
    for since_ms, until_ms in _spans(at_ms for at_ms in ended_ms.values() if at_ms > 0):
        wanted = LetterFilter(since_ms=since_ms, until_ms=until_ms)
        for piece in all_heads(yard, wanted, ""):
            found |= {_owner(one): one for one in piece if _owner(one) in ended_ms}
    return found


def _spans(times_ms: Iterable[int]) -> list[tuple[int, int]]:
    """The spans in which letters of these times may lie, those that overlap as one."""
    spans: list[tuple[int, int]] = []
    for at_ms in sorted(times_ms):
        since_ms, until_ms = max(0, at_ms - _BEFORE_MS), at_ms + _AFTER_MS
        if spans and since_ms <= spans[-1][1]:
            since_ms, _ = spans.pop()
        spans.append((since_ms, until_ms))
    return spans


def matching_letters(yard: Yard, query: Query, most: int, within_s: float) -> MatchingLetters:
    """The letters whose requests fit a query, the oldest first."""
    if "failed" not in query.states:
        return MatchingLetters([])
    give_up = clock.monotonic() + within_s
    now_ms = unix_ms(yard.connection.time())
    wanted = LetterFilter(
        model=query.model,
        client=query.client,
        tenant=query.tenant,
        since_ms=max(0, now_ms - query.newer_ms) if query.newer_ms else 0,
    )
    found: dict[Owned, LetterHead] = {}
    for piece in all_heads(yard, wanted, ""):
        listed = list(_with_workers(yard, query, piece))
        fitting = (head for head, one in zip(piece, listed, strict=True) if query.fits(now_ms, one))
        found |= {_owner(head): head for head in fitting if head.is_answerable}
        if len(found) > most:
            return MatchingLetters([*found.values()][:most], has_more=True)
        if clock.monotonic() > give_up:
            return MatchingLetters([*found.values()], is_whole=False)
    return MatchingLetters([*found.values()])


def _with_workers(yard: Yard, query: Query, heads: Sequence[LetterHead]) -> Iterator[Listed]:
    """The requests of letters; only their ledgers know their workers."""
    workers: dict[Owned, str] = {}
    if query.worker:
        known = by_ledger(yard, map(_owner, heads))
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
