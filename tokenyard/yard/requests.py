"""One request in a list: what its entry, its ledger and its result say of it.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, get_args

import msgspec
import redis
from msgspec import Struct

from tokenyard.protocol.keys import Yard, split_intake
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.replies import TERMINAL, Result, Status, decode_reply, to_result
from tokenyard.protocol.streams import position, whole
from tokenyard.protocol.wire import Refused, Request, Unanswerable
from tokenyard.scripts.client import PLACE_FIELDS, place_of, waits_at
from tokenyard.yard.pauses import Pause
from tokenyard.yard.reads import Fields, Owned

State = Literal["waiting", "assigned", Status]
STATES: Final[tuple[State, ...]] = get_args(State)
#: The states of a request that has no result yet.
IN_FLIGHT: Final[frozenset[str]] = frozenset(STATES) - TERMINAL

_LEDGER_FIELDS: Final = ("state", "sid", "worker", "attempt", "ended", "reason")
#: Of a token id in Redis.
TOKEN_BYTES: Final = 4
#: Where a request stands in a list: when it was accepted, the server's number, client and id.
Place = tuple[int, int, str, str]


class Listed(Struct, frozen=True, kw_only=True):
    """One request. Times are unix ms by the server's clock."""

    client: str
    id: str
    state: State
    model: str = ""  # empty: the yard's only one, or unknown
    tenant: str = ""
    worker: str = ""  # its present or last worker
    server_id: str = ""  # empty: it was cancelled before its arrival
    accepted_ms: int = 0  # 0: never
    ended_ms: int = 0  # 0: it has no result
    attempt: int = 0  # times that it was assigned, as far as known
    tokens: int = 0  # published so far
    error: str = ""  # error code, if it did not complete
    message: str = ""  # of that error; while it waits to run again, why its last attempt ended
    pauses: Sequence[Pause] = ()  # that it waits for

    @property
    def age_from_ms(self) -> int:
        """When it was accepted; for one that never arrived, when it was cancelled."""
        return self.accepted_ms or self.ended_ms

    @property
    def is_ended(self) -> bool:
        """Whether it has its result."""
        return self.state in TERMINAL

    @property
    def place(self) -> Place:
        """Its place in a list; no two requests have the same."""
        number = position(self.server_id.rpartition("/")[2])[1]
        return self.age_from_ms, number, self.client, self.id


def accepted_ms(server_id: str) -> int:
    """When the request of a server id was accepted, unix ms; 0 if unknown."""
    return position(server_id.rpartition("/")[2])[0]


def in_intake(name: str, entries: Iterable[tuple[str, Fields]]) -> Iterator[Listed]:
    """The requests that wait in an intake; others than requests are left out."""
    for entry, fields in entries:
        sid = text_of_field(fields, b"sid") if name == "retry" else ""
        if one := _listed(fields, "waiting", sid or f"{name}/{entry}"):
            yield msgspec.structs.replace(one, message=text_of_field(fields, b"reason"))


def on_lane(worker: str, entries: Iterable[tuple[str, Fields]]) -> Iterator[Listed]:
    """The requests on a lane; commands to the worker are left out."""
    for _, fields in entries:
        one = _listed(fields, "assigned", text_of_field(fields, b"sid"))
        attempt = fields.get(b"attempt", b"")
        if one is not None and attempt.isdigit():
            yield msgspec.structs.replace(one, worker=worker, attempt=whole(attempt))


def _listed(fields: Fields, state: State, server_id: str) -> Listed | None:
    request = parse_request(fields)
    if isinstance(request, Unanswerable):
        return None
    known = request if isinstance(request, Request) else None
    return Listed(
        client=request.client,
        id=request.id,
        state=state,
        model=known.model if known else "",
        tenant=tenant_of(server_id) or (known.tenant if known else ""),
        server_id=server_id,
        accepted_ms=accepted_ms(server_id),
    )


def tenant_of(server_id: str) -> str:
    """Whose intake the request of a server id came from; "" for a common one."""
    return split_intake(server_id.rpartition("/")[0])[1]


def text_of_field(fields: Fields, name: bytes) -> str:
    """A field of an entry or a ledger; "" where it has none."""
    return fields.get(name, b"").decode(errors="replace")


def by_ledger(yard: Yard, owners: Iterable[Owned]) -> Iterator[Listed]:
    """Those of these requests that have a ledger; what is in their results is left out."""
    named = list(owners)
    pipeline = yard.connection.pipeline(transaction=False)
    for client, request_id in named:
        pipeline.hmget(yard.keys.ledger(client, request_id), *_LEDGER_FIELDS)
    for (client, request_id), raw in zip(named, pipeline.execute(), strict=True):
        texts = ((value or b"").decode(errors="replace") for value in raw)
        state, sid, worker, attempt, ended, reason = texts
        if state in STATES:
            yield Listed(
                client=client,
                id=request_id,
                state=state,
                tenant=tenant_of(sid),
                worker=worker,
                server_id=sid,
                accepted_ms=accepted_ms(sid),
                ended_ms=max(0, whole(ended)),
                attempt=max(0, whole(attempt)),
                message=reason if state == "waiting" else "",
            )


def with_results(yard: Yard, listed: Sequence[Listed]) -> list[Listed]:
    """Add what only results contain: model, tokens, error."""
    pipeline = yard.connection.pipeline(transaction=False)
    for one in listed:
        pipeline.hget(yard.keys.ledger(one.client, one.id), "result")
    return [
        _with_result(one, packed) for one, packed in zip(listed, pipeline.execute(), strict=True)
    ]


def _with_result(one: Listed, packed: bytes | None) -> Listed:
    result: Result | None = None
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        result = to_result(decode_reply(packed)) if packed else None
    if result is None:
        return one
    made, error = result.provenance, result.error
    return msgspec.structs.replace(
        one,
        model=made.model if made else one.model,
        tokens=result.usage.completion_tokens if result.usage else len(result.tokens),
        error=error.code if error else "",
        message=error.message if error else "",
    )


def published(yard: Yard, listed: Sequence[Listed]) -> list[int]:
    """How many tokens of each are published; 0 once it has its result."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for one in listed:
        pipeline.strlen(yard.keys.tokens(one.client, one.id))
    return [length // TOKEN_BYTES for length in pipeline.execute()]


def read_submitted(yard: Yard, client: str, request_id: str) -> Request | Refused | None:
    """A request from its entry in an intake or on a lane; None once it has ended."""
    ledger: Any = yard.connection.hmget(yard.keys.ledger(client, request_id), *PLACE_FIELDS)
    state, where = place_of(ledger)
    if not where:
        return None
    sid, intake, _, entry = ((value or b"").decode(errors="replace") for value in ledger[1:])
    stream, at = yard.keys.lane(where), entry
    if state == "waiting":
        stream, at = yard.keys.intake(where), waits_at(sid, intake, entry)[1]
    return _at(yard.connection, stream, at, client, request_id)


def read_letter(yard: Yard, letter: str, client: str, request_id: str) -> Request | Refused | None:
    """A request from its dead letter; None where that is gone, or another's."""
    return _at(yard.connection, yard.keys.dead, letter, client, request_id)


def _at(
    connection: redis.Redis, stream: str, entry: str, client: str, request_id: str
) -> Request | Refused | None:
    """The request of an entry if it is this one: a client can write another's place."""
    found: Any = connection.xrange(stream, entry, entry)
    request = parse_request(found[0][1]) if found else Unanswerable("there is no entry")
    if isinstance(request, Unanswerable) or (request.client, request.id) != (client, request_id):
        return None
    return request
