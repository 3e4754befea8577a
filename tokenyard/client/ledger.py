"""What a client reads from the ledger of a request, and how.

The ledger is where a request stands whatever became of its replies: a client that comes back, or
that has heard nothing for a while, looks there.
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
from tokenyard.scripts import PLACE_FIELDS

_STATUS_FIELDS: Final = ("state", "sid", "worker", "attempt", "crashes")


class Cancellation(enum.StrEnum):
    """What became of a request that was to be cancelled."""

    CANCELLED = "cancelled"  # it has its result, ``cancelled``
    OVER = "over"  # it had its result before
    #: The yard does not know it. Should it come, it is not run; its result is there already.
    CANCELLED_BEFORE_ARRIVAL = "forestalled"


class RequestState(Struct, frozen=True, kw_only=True):
    """Where a request stands."""

    id: str
    state: str  # waiting, assigned, completed, failed, cancelled or expired
    server_id: str  # unique in the yard, in the order of arrival
    worker: str = ""  # who has it, or had it last
    attempt: int = 0  # times that it was given to a worker
    crashes: int = 0  # workers that died with it
    tokens_published: int = 0  # as deltas, by the attempts so far; 0 once there is a result

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return self.state in TERMINAL


def status_commands(keys: Keys, client: str, request_id: str) -> list[Command]:
    """What to ask for a `RequestState`."""
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


def place_command(keys: Keys, client: str, request_id: str) -> Command:
    """What to ask for `tokenyard.scripts.place_of`."""
    return ("HMGET", keys.ledger(client, request_id), *PLACE_FIELDS)


def unknown(request_id: str) -> UnknownRequest:
    """The error for a request that has no ledger."""
    return UnknownRequest(f"the yard knows no request {request_id!r}, or its result has expired")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A request at one moment: its state, its result if there is one, else its tokens so far."""

    state: str  # empty where the yard does not know the request
    result: bytes | None  # msgpack map
    published: bytes  # packed
    digest: str = ""  # of the request; empty where nobody gave one


def snapshot_commands(keys: Keys, client: str, request_ids: Sequence[str]) -> list[Command]:
    """What to ask for the snapshots of some requests: each result, then the tokens without one."""
    commands: list[Command] = []
    for request_id in request_ids:
        commands.append(("HMGET", keys.ledger(client, request_id), "state", "result", "digest"))
        commands.append(("GET", keys.tokens(client, request_id)))
    return commands


def read_snapshots(answers: Sequence[Any]) -> list[Snapshot]:
    """Read the answers to `snapshot_commands`."""
    pairs = zip(answers[::2], answers[1::2], strict=True)
    return [
        Snapshot((state or b"").decode(), result, published or b"", (digest or b"").decode())
        for (state, result, digest), published in pairs
    ]
