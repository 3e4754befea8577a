"""Which coordinator leads the yard: one, by a lease with an epoch; the others stand by."""

from __future__ import annotations

import logging
import math
from typing import Final

import redis

from tokenyard import clock
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.leadership")

#: A coordinator that stands by says so at this interval, and is shown for three of them.
ANNOUNCE_S: Final = 10.0


class LostLeadership(Exception):
    """Another coordinator leads."""


class Leadership:
    """Takes and keeps the lead.

    `token` is "<epoch>:<name>" while this coordinator leads and "" while it does not; every
    script that moves a request compares it, so a leader that has lost the lead without knowing it
    moves nothing.
    """

    def __init__(
        self, connection: redis.Redis, scripts: Scripts, keys: Keys, name: str, lease_ms: int
    ) -> None:
        self.token = ""
        self._connection = connection
        self._scripts = scripts
        self._keys = keys
        self._name = name
        self._lease_ms = lease_ms
        self._due = 0.0
        self._leader = ""  # the known leader while this one stands by
        self._announced = 0.0  # when the next announcement is due (monotonic); 0: none yet

    def keep(self) -> bool:
        """Renew the lease, or try to take it, when that is due; whether this one leads."""
        if clock.monotonic() < self._due:
            return bool(self.token)
        before = self.token
        self.token = self._scripts.lead(self._name, self._lease_ms, before)
        self._due = clock.monotonic() + self._lease_ms / (3000 if self.token else 10_000)
        self._log_change(before)
        if not self.token:
            self._announce()
        return bool(self.token)

    def _log_change(self, before: str) -> None:
        if self.token:
            if self.token != before:
                log.info("leads as %s", self.token)
                self._leader = ""
            return
        token = self._connection.get(self._keys.leader)
        _epoch, _, leader = (token.decode() if isinstance(token, bytes) else "").partition(":")
        if leader and leader != self._leader:
            was = f" (was {before})" if before else ""
            log.info("stands by%s: %s leads", was, leader)
            self._leader = leader

    def _announce(self) -> None:
        """Show that this one stands by."""
        if clock.monotonic() < self._announced:
            return
        self._announced = clock.monotonic() + ANNOUNCE_S
        try:
            self._scripts.stand_by(self._name, round(3000 * ANNOUNCE_S))
        except redis.exceptions.NoPermissionError as error:
            self._announced = math.inf
            log.warning("operators do not see that it stands by: %s", error)

    def lose(self) -> None:
        """Another leads: a script has just reported it."""
        log.warning("lost the lead, was %s", self.token)
        self.token = ""

    def resign(self) -> None:
        """Give the lead up, so that a standby need not wait for the lease to end."""
        if self.token:
            self._scripts.resign(self.token)
            self.token = ""
        elif 0 < self._announced < math.inf:
            self._scripts.stand_by(self._name, 0)
