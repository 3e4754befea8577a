"""Which coordinator leads the yard: one, by a lease with an epoch; the others stand by."""

from __future__ import annotations

import logging
import math
from typing import Final

import redis

from tokenyard import clock
from tokenyard.broker.direct import ask_all
from tokenyard.protocol.streams import unix_ms
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.leadership")

#: A coordinator that stands by says so at this interval, and is shown for three of them.
ANNOUNCE_S: Final = 10.0
#: Longest wait for a lease that does not move, in leases of our own.
_MOST_LEASES: Final = 5


class Leadership:
    """Takes and keeps the lead.

    `token` is "<epoch>:<name>" while this coordinator leads and "" while it does not; every
    script that moves a request compares it, so a leader that has lost the lead without knowing it
    moves nothing.
    """

    def __init__(self, scripts: Scripts, name: str, lease_ms: int) -> None:
        self.token = ""
        self._yard = scripts.yard
        self._scripts = scripts
        self._name = name
        self._lease_ms = lease_ms
        self._due = 0.0
        self._leader = ""  # the known leader while this one stands by
        self._ends_ms = 0  # when that leader's lease ends, by the server
        self._moved_at = 0.0  # when it last did not end then (monotonic)
        self._patience_s = 0.0
        self._announced = 0.0  # when the next announcement is due (monotonic); 0: none yet

    def keep(self) -> bool:
        """Renew the lease, or try to take it, when that is due; whether this one leads."""
        if clock.monotonic() < self._due:
            return bool(self.token)
        before = self.token
        stuck_ms = 0 if before else self._stuck_ms()
        self.token = self._scripts.lead(self._name, self._lease_ms, before, stuck_ms=stuck_ms)
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
        token = self._watch()
        _epoch, _, leader = (token.decode() if isinstance(token, bytes) else "").partition(":")
        if leader and leader != self._leader:
            was = f" (was {before})" if before else ""
            log.info("stands by%s: %s leads", was, leader)
            self._leader = leader

    def _watch(self) -> object:
        """Note whether the lease of the leader moves; returns its token."""
        key = self._yard.keys.leader
        ask = [("GET", key), ("PEXPIRETIME", key), ("TIME",)]
        token, ends_ms, now = ask_all(self._yard.connection, ask)
        if ends_ms != self._ends_ms:
            self._ends_ms, self._moved_at = ends_ms, clock.monotonic()
            # Right after a renewal that is the length of its lease, which need not be ours. Where
            # the server's clock was set back before we came, it says nothing.
            left_ms = ends_ms - unix_ms(now)
            length_ms = min(max(left_ms, self._lease_ms), _MOST_LEASES * self._lease_ms)
            self._patience_s = length_ms / 1000
        return token

    def _stuck_ms(self) -> int:
        """When the leader's lease ends, if that has not moved for the length of the lease.

        The server ends a lease by its own clock. If that was set back by an hour, a leader that has
        died would lead for another hour; by our monotonic clock its lease is over.
        """
        is_stuck = clock.monotonic() - self._moved_at >= self._patience_s
        return self._ends_ms if is_stuck and self._ends_ms > 0 else 0

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
