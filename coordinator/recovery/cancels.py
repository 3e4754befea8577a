"""Cancels requests on behalf of clients, which may not run the cancel script themselves.

The stream `cancelling` wakes the leader and names clients; the ids to cancel are in a set of each
client, which no other client may write, so a client can cancel only its own requests. An entry of
the stream stays until all ids of its client are cancelled, so the next leader continues.
"""

from __future__ import annotations

import logging
from typing import Any

import redis

from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.protocol.parse import parse_id, parse_name
from tokenyard.protocol.streams import FAR_FUTURE_MS, position
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Cancelled

log = logging.getLogger("tokenyard.coordinator.cancels")

#: The stream is read so often without an event, for what an earlier leader has left.
EVERY_S = 1.0
#: Clients served, and requests cancelled, in one turn.
MOST_CLIENTS = 100
MOST_CANCELLED = 100


class CancelRequests:
    """Carries out cancels, a bounded number in a turn."""

    def __init__(self, scripts: Scripts, counts: CoordinatorCounts) -> None:
        self._counts = counts
        self._yard = scripts.yard
        self._scripts = scripts
        self._due = 0.0
        self._left = 0  # how many may still be cancelled in this turn

    @property
    def has_more(self) -> bool:
        """Whether the next turn should not wait: this one ended before its work was done."""
        return not self._due

    def run_once(self, *, is_woken: bool = False) -> None:
        """Cancel requested ids, when an event arrived or it is time to check."""
        if not is_woken and clock.monotonic() < self._due:
            return
        self._left = MOST_CANCELLED
        cancels: Any = self._yard.connection.xrange(self._yard.keys.cancelling, count=MOST_CLIENTS)
        served: dict[str, bool] = {}
        done = []
        for entry, fields in cancels:
            client = parse_name(fields.get(b"client", b""))
            if client is None:
                self._counts.bad["cancels"] += 1
                log.warning("removed an entry of the cancels that names no client: %s", entry)
                done.append(entry)
                continue
            if client not in served:
                served[client] = self._serve(client)
            if served[client]:
                done.append(entry)
        if done:
            self._yard.connection.xdel(self._yard.keys.cancelling, *done)
        if len(done) == len(cancels) < MOST_CLIENTS:
            self._heal()
        has_more = len(done) < len(cancels) or len(cancels) == MOST_CLIENTS
        self._due = 0.0 if has_more else clock.monotonic() + EVERY_S

    def _heal(self) -> None:
        """Delete the stream after an id of the far future, which permits no more entries."""
        cancels = self._yard.keys.cancelling
        try:
            last: Any = self._yard.connection.xinfo_stream(cancels)["last-generated-id"]
        except redis.ResponseError:  # it does not exist
            return
        if position(last.decode())[0] < FAR_FUTURE_MS or self._yard.connection.xlen(cancels):
            return
        self._yard.connection.delete(cancels)
        self._counts.bad["cancels"] += 1
        log.warning("deleted the stream of cancels: its last entry was %s", last.decode())

    def _serve(self, client: str) -> bool:
        """Cancel the ids of a client; whether none is left."""
        cancels = self._yard.keys.cancels(client)
        ids: Any = self._yard.connection.srandmember(cancels, self._left) if self._left else ()
        has_room = len(ids) < self._left
        self._left -= len(ids)
        done = [self._cancel(client, request_id) for request_id in ids]
        return all(done) and has_room

    def _cancel(self, client: str, request_id: bytes) -> bool:
        """Cancel one request and remove its id; an invalid id is removed only.

        False if the request moved each time: its id stays, and a later turn tries again.
        """
        ids = self._yard.keys.cancels(client)
        code = cancel_listed(self._scripts, ids, client, request_id, "cancelled by the client")
        if code is None:
            self._counts.bad["cancels"] += 1
            log.warning("removed an invalid id from the cancels of %s", client)
        elif code is not Cancelled.MOVED:
            log.info("%s asked to cancel %s: %s", client, request_id.decode(), code.name)
        return code is not Cancelled.MOVED


def cancel_listed(
    scripts: Scripts, ids: str, client: str, request_id: bytes, reason: str
) -> Cancelled | None:
    """Cancel a request of a client, and remove its id from the set ``ids``; None: it is no id.

    The id stays where the request moved each time, so that the caller tries again later.
    """
    name = parse_id(request_id)
    code = None if name is None else scripts.cancel(client, name, reason)
    if code is not Cancelled.MOVED:
        # After the cancel, so that the next leader tries again if this one dies in between.
        scripts.yard.connection.srem(ids, request_id)
    return code
