"""Cancels what clients wish to be cancelled that have no right to do it themselves.

The stream `wishers` wakes and names clients; what a client wishes stands in a set of its own,
which nobody else may write, so nobody can wish for another. An entry of the stream stays until
all wishes of its client are granted, so a successor finds what a leader has left.
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

log = logging.getLogger("tokenyard.coordinator.wishes")

#: Looked for without being woken, for what an earlier leader has left.
EVERY_S = 1.0
#: Clients looked at, and requests cancelled, in one turn.
MOST_CLIENTS = 100
MOST_CANCELLED = 100
#: The year 2286.
FAR_FUTURE_MS = 10**13


class Wishes:
    """Grants the wishes of clients, a bounded number in a turn."""

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
        wishers: Any = self._connection.xrange(self._keys.wishers, count=MOST_CLIENTS)
        served: dict[str, bool] = {}
        done = []
        for entry, fields in wishers:
            client = parse_name(fields.get(b"client", b""))
            if client is None:
                self._found_bad("wishers")
                log.warning("removed an entry of the wishers that names no client: %s", entry)
                done.append(entry)
                continue
            if client not in served:
                served[client] = self._serve(client)
            if served[client]:
                done.append(entry)
        if done:
            self._connection.xdel(self._keys.wishers, *done)
        if len(done) == len(wishers) < MOST_CLIENTS:
            self._heal()
        has_more = len(done) < len(wishers) or len(wishers) == MOST_CLIENTS
        self._due = 0.0 if has_more else time.monotonic() + EVERY_S

    def _heal(self) -> None:
        """Make the stream anew behind an id of the far future, which lets no other follow."""
        wishers = self._keys.wishers
        try:
            last: Any = self._connection.xinfo_stream(wishers)["last-generated-id"]
        except redis.ResponseError:  # there is none: the next leader makes it
            return
        if position(last.decode())[0] < FAR_FUTURE_MS or self._connection.xlen(wishers):
            return
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.delete(wishers)
        pipeline.xgroup_create(wishers, GROUP, id="0", mkstream=True)
        pipeline.execute()
        self._found_bad("wishers")
        log.warning("made the stream of wishers anew: its last entry was %s", last.decode())

    def _serve(self, client: str) -> bool:
        """Cancel what a client wishes; whether nothing of it is left."""
        wishes = self._keys.wishes(client)
        ids: Any = self._connection.srandmember(wishes, self._left) if self._left else ()
        has_room = len(ids) < self._left
        self._left -= len(ids)
        granted = [self._grant(client, wish) for wish in ids]
        return all(granted) and has_room

    def _grant(self, client: str, wish: bytes) -> bool:
        """Cancel one request, if its id is one; not where it moves faster than one can look."""
        name, code = parse_id(wish), Cancelled.OVER
        if name is None:
            self._found_bad("wishes")
        else:
            code = self._scripts.cancel(client, name, "cancelled by the client")
        if code is Cancelled.MOVED:
            return False
        # Not before: should we die in between, our successor tries again.
        self._connection.srem(self._keys.wishes(client), wish)
        log.info("cancelled %s/%s, as its client wished: %s", client, name, code.name)
        return True
