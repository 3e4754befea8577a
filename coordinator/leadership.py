"""Who leads the yard: one coordinator by a lease with an epoch; the others stand by."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.leadership")


class Leadership:
    """Takes and keeps the lead.

    `token` is "<epoch>:<name>" while this coordinator leads and "" while it does not; every
    script that moves a request compares it, so a leader that is deposed without knowing it
    moves nothing.
    """

    def __init__(self, scripts: Scripts, name: str, lease_ms: int, read: Callable[[], str]) -> None:
        """``read`` gives the token of whoever leads, "" where nobody does."""
        self.token = ""
        self._scripts = scripts
        self._name = name
        self._lease_ms = lease_ms
        self._read = read
        self._due = 0.0
        self._leader = ""  # who leads while this one stands by, as far as it was told

    def keep(self) -> bool:
        """Renew the lease, or try to take it, when that is due; whether this one leads."""
        if time.monotonic() < self._due:
            return bool(self.token)
        before = self.token
        self.token = self._scripts.lead(self._name, self._lease_ms, before)
        self._due = time.monotonic() + self._lease_ms / (3000 if self.token else 10_000)
        self._tell(before)
        return bool(self.token)

    def _tell(self, before: str) -> None:
        """Log what is new: that this one leads, or stands by, and who leads then."""
        if self.token:
            if self.token != before:
                log.info("leads as %s", self.token)
                self._leader = ""
            return
        _epoch, _, leader = self._read().partition(":")
        if leader and leader != self._leader:
            was = f" (was {before})" if before else ""
            log.info("stands by%s: %s leads", was, leader)
            self._leader = leader

    def lose(self) -> None:
        """Another leads: a script has just said so."""
        log.warning("deposed, was %s", self.token)
        self.token = ""

    def resign(self) -> None:
        """Give the lead up, so that a standby need not wait for the lease to end."""
        if self.token:
            self._scripts.resign(self.token)
            self.token = ""
