"""Cancels requests for clients that have no right to do so themselves.

The stream `cancelling` wakes and names clients; what a client wants cancelled stands in a set of
its own, which nobody else may write, so nobody can ask for another. An entry of the stream stays
until all cancel requests of its client are granted, so a successor finds what a leader has left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import redis

from tokenyard.protocol.keys import GROUP, Keys
from tokenyard.protocol.parse import parse_id, parse_name
from tokenyard.protocol.streams import position
from tokenyard.scripts import Cancelled, Scripts

log = logging.getLogger("tokenyard.coordinator.cancelling")

#: Looked for without being woken, for what an earlier leader has left.
EVERY_S = 1.0
#: Clients looked at, and requests cancelled, in one turn.
MOST_CLIENTS = 100
MOST_CANCELLED = 100
#: The year 2286.
FAR_FUTURE_MS = 10**13


class CancelRequests:
    """Grants the cancel requests of clients, a bounded number in a turn."""

    def __init__(
        self,
        connection: redis.Redis,
        scripts: Scripts,
        keys: Keys,
        found_bad: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``found_bad`` hears of values that were removed, by where they were."""
        self._found_bad = found_bad
        self._connection = connection
        self._scripts = scripts
        self._keys = keys
        self._due = 0.0
        self._left = 0  # how many may still be cancelled in this turn

    @property
    def has_more(self) -> bool:
        """Whether the next turn should not wait: this one ended before its work was done."""
        return not self._due

    def run_once(self, *, is_woken: bool = False) -> None:
        """Grant what is wished, when somebody says so or it is time to look."""
        if not is_woken and time.monotonic() < self._due:
            return
        self._left = MOST_CANCELLED
        cancels: Any = self._connection.xrange(self._keys.cancelling, count=MOST_CLIENTS)
        served: dict[str, bool] = {}
        done = []
        for entry, fields in cancels:
            client = parse_name(fields.get(b"client", b""))
            if client is None:
                self._found_bad("cancels")
                log.warning("removed an entry of the cancels that names no client: %s", entry)
                done.append(entry)
                continue
            if client not in served:
                served[client] = self._serve(client)
            if served[client]:
                done.append(entry)
        if done:
            self._connection.xdel(self._keys.cancelling, *done)
        if len(done) == len(cancels) < MOST_CLIENTS:
            self._heal()
        has_more = len(done) < len(cancels) or len(cancels) == MOST_CLIENTS
        self._due = 0.0 if has_more else time.monotonic() + EVERY_S

    def _heal(self) -> None:
        """Make the stream anew behind an id of the far future, which lets no other follow."""
        cancels = self._keys.cancelling
        try:
            last: Any = self._connection.xinfo_stream(cancels)["last-generated-id"]
        except redis.ResponseError:  # there is none: the next leader makes it
            return
        if position(last.decode())[0] < FAR_FUTURE_MS or self._connection.xlen(cancels):
            return
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.delete(cancels)
        pipeline.xgroup_create(cancels, GROUP, id="0", mkstream=True)
        pipeline.execute()
        self._found_bad("cancels")
        log.warning("made the stream of cancels anew: its last entry was %s", last.decode())

    def _serve(self, client: str) -> bool:
        """Cancel what a client asks for; whether nothing of it is left."""
        cancels = self._keys.cancels(client)
        ids: Any = self._connection.srandmember(cancels, self._left) if self._left else ()
        has_room = len(ids) < self._left
        self._left -= len(ids)
        granted = [self._grant(client, request_id) for request_id in ids]
        return all(granted) and has_room

    def _grant(self, client: str, request_id: bytes) -> bool:
        """Cancel one request, if its id is one; not where it moves faster than one can look."""
        name, code = parse_id(request_id), Cancelled.OVER
        if name is None:
            self._found_bad("cancels")
        else:
            code = self._scripts.cancel(client, name, "cancelled by the client")
        if code is Cancelled.MOVED:
            return False
        # Not before: should we die in between, our successor tries again.
        self._connection.srem(self._keys.cancels(client), request_id)
        log.info("cancelled %s/%s, as its client wished: %s", client, name, code.name)
        return True
