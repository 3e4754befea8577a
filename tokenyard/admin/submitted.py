"""A request as it was submitted, while the yard still has it.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from typing import Any

import redis

from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import Refused, Request, Unanswerable
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import PLACE_FIELDS, place_of, waits_at


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
