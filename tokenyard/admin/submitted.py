"""A request as it was submitted, while the yard still has it: it waits, runs, or is a dead letter.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from typing import Any

import redis

from tokenyard.admin.dead_letters import letter_of
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.streams import whole
from tokenyard.protocol.wire import Refused, Request, Unanswerable
from tokenyard.scripts import PLACE_FIELDS, place_of, waits_at


def read_submitted(
    connection: redis.Redis, keys: Keys, client: str, request_id: str
) -> Request | Refused | None:
    """A request from its place in an intake, on a lane or among the dead letters; None: gone."""
    ledger: Any = connection.hmget(keys.ledger(client, request_id), *PLACE_FIELDS, "ended")
    *seen, ended = ledger
    if ended:
        letter = letter_of(connection, keys, client, request_id, whole(ended))
        return _at(connection, keys.dead, letter.letter, client, request_id) if letter else None
    state, where = place_of(seen)
    if not where:
        return None
    sid, intake, _, entry = ((value or b"").decode(errors="replace") for value in seen[1:])
    stream, at = keys.lane(where), entry
    if state == "waiting":
        stream, at = keys.intake(where), waits_at(sid, intake, entry)[1]
    return _at(connection, stream, at, client, request_id)


def _at(
    connection: redis.Redis, stream: str, entry: str, client: str, request_id: str
) -> Request | Refused | None:
    """The request of an entry if it is this one: a client can write another's place."""
    found: Any = connection.xrange(stream, entry, entry)
    request = parse_request(found[0][1]) if found else Unanswerable("there is no entry")
    if isinstance(request, Unanswerable) or (request.client, request.id) != (client, request_id):
        return None
    return request
