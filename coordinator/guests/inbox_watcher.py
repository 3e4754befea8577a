"""Notices that guests have written, and wakes the leader.

A blocking read of an inbox would return everything in it, however large. So a thread polls the
lengths of the inboxes, over a connection of its own, and wakes the leader by an event.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

import redis

from tokenyard import clock
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.keys import Keys

log = logging.getLogger("tokenyard.coordinator.inbox_watcher")

#: Time between two polls while guests write, and while they do not.
BUSY_S: Final = 0.002
IDLE_S: Final = 0.02
STAYS_BUSY_S: Final = 2.0
#: After an error, and while the coordinator does not lead.
AWAY_S: Final = 0.5
#: Least pause for each guest, so that many of them leave time to others.
EACH_S: Final = 0.0001
_TIMEOUT_S: Final = 5.0


class InboxWatcher:
    """The thread `inbox-watcher`, which polls while its coordinator leads."""

    def __init__(self, redis_url: str, keys: Keys, guests: Sequence[str]) -> None:
        self._url = redis_url
        self._keys = keys
        self._guests = guests
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._written: tuple[str, ...] = ()  # that the leader has not taken yet
        self._taken_until = 0.0
        self._rests_until = 0.0
        self._busy_until = 0.0

    def take(self) -> tuple[str, ...]:
        """The guests that have written something; the leader must call it regularly."""
        self._taken_until = clock.monotonic() + STAYS_BUSY_S
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="inbox-watcher", daemon=True)
            self._thread.start()
        written, self._written = self._written, ()
        return written

    def rest(self, seconds: float) -> None:
        """Do not wake the leader for so long."""
        self._rests_until = clock.monotonic() + seconds

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        with open_connection(self._url, timeout_s=_TIMEOUT_S, retries=0) as connection:
            pause_s = IDLE_S
            while not clock.wait(self._stopped, pause_s):
                try:
                    pause_s = self._poll(connection)
                except redis.RedisError as error:
                    log.debug("cannot poll the inboxes: %s", error)
                    pause_s = AWAY_S

    def _poll(self, connection: redis.Redis) -> float:
        """Poll once; how long to wait for the next time."""
        now = clock.monotonic()
        if now > self._taken_until + _TIMEOUT_S:
            return AWAY_S
        if self._written or now < self._rests_until:
            return BUSY_S
        pipeline = connection.pipeline(transaction=False)
        guests = self._guests
        for guest in guests:
            pipeline.xlen(self._keys.inbox(guest))
        lengths = pipeline.execute()
        written = tuple(one for one, length in zip(guests, lengths, strict=True) if length)
        if written:
            self._busy_until = now + STAYS_BUSY_S
            self._written = written
            connection.xadd(self._keys.events, {"event": "inbox"}, maxlen=1000)
        return max(BUSY_S if now < self._busy_until else IDLE_S, len(guests) * EACH_S)
