"""Deletes what tenants used longer ago than it is kept, a bounded part at a time.

Scripts write ``usage:<tenant>`` by day and never look back. A lap looks at all of these hashes in
pieces, one piece a second, and rests for an hour behind it. A yard that has had no tenant has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from tokenyard import clock
from tokenyard.clock import BrokerTime
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.tenants import outdated
from tokenyard.protocol.texts import counted

log = logging.getLogger("tokenyard.coordinator.usage_pruner")

EVERY_S = 1.0
#: Between two laps.
REST_S = 3600.0
#: Keys of the server, or fields of one tenant's usage, that one piece reads, about.
MOST_READ = 1000


class UsagePruner:
    """Prunes the usage of all tenants while its coordinator leads.

    It needs no fence: what is too old for one leader is so for every other.
    """

    def __init__(self, yard: Yard, broker_time: BrokerTime) -> None:
        self._yard = yard
        self._broker_time = broker_time
        self._token = ""
        self._lap: Iterator[None] = iter(())
        self._due = 0.0  # monotonic
        self._is_allowed = True

    def run_once(self, token: str) -> None:
        """Prune one piece, when that is due."""
        if token != self._token:
            self._token, self._is_allowed = token, True
            self._lap, self._due = self._pieces(), 0.0
        if not self._is_allowed or clock.monotonic() < self._due:
            return
        self._due = clock.monotonic() + EVERY_S
        try:
            next(self._lap)
        except StopIteration:
            self._lap = self._pieces()
            self._due = clock.monotonic() + REST_S
        except NoPermissionError as error:
            self._is_allowed = False
            log.warning("old usage of tenants stays: the user of Redis may not prune it: %s", error)

    def _pieces(self) -> Iterator[None]:
        """A lap; it stops behind each piece."""
        run: Any = self._yard.connection  # redis-py's replies have no types
        cursor, deleted = 0, 0
        if not run.zrevrange(self._yard.keys.service, 0, 0):
            return
        while True:
            cursor, keys = run.scan(cursor, match=self._yard.keys.usage("*"), count=MOST_READ)
            yield
            for key in keys:
                for pruned in self._prune(run, key):
                    deleted += pruned
                    yield
            if not cursor:
                break
        if deleted:
            log.info("deleted %s of usage that is too old", counted(deleted, "count"))

    def _prune(self, run: Any, key: bytes) -> Iterator[int]:
        """How many fields of one hash were deleted, piece by piece."""
        cursor = 0
        while True:
            try:
                cursor, fields = run.hscan(key, cursor, count=MOST_READ)
            except NoPermissionError:
                raise
            except ResponseError as error:  # it is no hash
                log.warning("the usage in %r cannot be read: %s", key, error)
                return
            old = outdated(fields, self._broker_time.now_ms / 1000)
            yield run.hdel(key, *old) if old else 0
            if not cursor:
                return
