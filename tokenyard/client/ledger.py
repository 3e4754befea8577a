"""How a client reads the ledger of a request.

The ledger has the state of a request even where its replies were lost: a client reads it after a
restart, and for requests that were silent for a while.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct

from tokenyard.client.operations import Command
from tokenyard.protocol.errors import UnknownRequest
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import TERMINAL

_STATUS_FIELDS: Final = ("state", "sid", "worker", "attempt", "crashes")
_SNAPSHOT_FIELDS: Final = ("state", "result", "digest", "cached")


class Cancellation(enum.StrEnum):
    """The outcome of a cancel."""

    CANCELLED = "cancelled"  # it has its result, ``cancelled``
    OVER = "over"  # it had its result before
    #: The yard does not know the request. If it comes later, it is not run: it has its result.
    CANCELLED_BEFORE_ARRIVAL = "cancelled_before_arrival"


class RequestState(Struct, frozen=True, kw_only=True):
    """The state of a request."""

    id: str
    state: str  # waiting, assigned, completed, failed, cancelled or expired
    server_id: str  # unique in the yard, in the order of arrival
    worker: str = ""  # that has it, or had it last
    attempt: int = 0  # how often it was assigned to a worker
    crashes: int = 0  # workers that died while they ran it
    tokens_published: int = 0  # as deltas, by all attempts; 0 once there is a result

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return self.state in TERMINAL


def status_commands(keys: Keys, client: str, request_id: str) -> list[Command]:
    """The commands for `read_status`."""
    return [
        ("HMGET", keys.ledger(client, request_id), *_STATUS_FIELDS),
        ("STRLEN", keys.tokens(client, request_id)),
    ]


def read_status(request_id: str, answers: Sequence[Any]) -> RequestState:
    """Read the answers to `status_commands`; raises `UnknownRequest`."""
    fields, published = answers
    state, sid, worker, attempt, crashes = ((value or b"").decode() for value in fields)
    if not state:
        raise unknown(request_id)
    return RequestState(
        id=request_id,
        state=state,
        server_id=sid,
        worker=worker,
        attempt=int(attempt or 0),
        crashes=int(crashes or 0),
        tokens_published=published // 4,
    )


def unknown(request_id: str) -> UnknownRequest:
    """The error for a request that has no ledger."""
    return UnknownRequest(f"the yard knows no request {request_id!r}, or its result has expired")


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request at one moment: its state, and its result or its tokens so far."""

    state: str  # empty where the yard does not know the request
    result: bytes | None  # msgpack map
    published: bytes  # packed
    digest: str = ""  # of the request; empty where it has none
    cached: bytes | None = None  # see `tokenyard.protocol.replies.encode_cached`


def snapshot_commands(keys: Keys, client: str, request_ids: Sequence[str]) -> list[Command]:
    """The commands for `read_snapshots`, two for each request."""
    commands: list[Command] = []
    for request_id in request_ids:
        commands.append(("HMGET", keys.ledger(client, request_id), *_SNAPSHOT_FIELDS))
        commands.append(("GET", keys.tokens(client, request_id)))
    return commands


def read_snapshots(answers: Sequence[Any]) -> list[RequestSnapshot]:
    """Read the answers to `snapshot_commands`."""
    pairs = zip(answers[::2], answers[1::2], strict=True)
    return [
        RequestSnapshot(
            (state or b"").decode(), result, published or b"", (digest or b"").decode(), cached
        )
        for (state, result, digest, cached), published in pairs
    ]
