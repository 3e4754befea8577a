"""Who is a guest: the users that the settings name, and the tenants that operators made guests.

The leader learns the latter from the registry of tenants, whenever that changes, so that a new one
needs no restart; and at the same time whether the yard has tenants at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

import redis

from tokenyard import clock
from tokenyard.protocol.keys import TENANT_CAME, Keys
from tokenyard.protocol.receipts import owner_of
from tokenyard.protocol.system_clients import why_no_guest
from tokenyard.protocol.tenants import guests_among

log = logging.getLogger("tokenyard.coordinator.guests")

#: The registry is read again so often without news, in case that an event was lost; and not more
#: often, whatever the events say.
EVERY_S: Final = 60.0
REST_S: Final = 0.5
#: Guests of the registry that are heard: each is one more inbox to look at, all the time.
MOST_GUESTS: Final = 1_000
_PAGE: Final = 1_000
#: A yard has tenants for so long after one of them has submitted, if the registry has none.
REMEMBERED_MS: Final = 24 * 3600 * 1000
_MOST_DIGITS: Final = 16  # clients may write that time


class GuestRegistry:
    """The guests of one yard."""

    def __init__(self, connection: redis.Redis, keys: Keys, fixed: Iterable[str]) -> None:
        """``fixed`` are those of the settings."""
        self._connection = connection
        self._keys = keys
        self._fixed = tuple(dict.fromkeys(fixed))
        self._due = 0.0
        self._read = -REST_S  # monotonic
        #: All guests, those of the settings first.
        self.names: Sequence[str] = self._fixed
        #: Whether requests without a tenant must leave room for tenants.
        self.has_tenants = False

    def hurry(self) -> None:
        """Settings of tenants have changed: read them soon."""
        self._due = min(self._due, self._read + REST_S)

    def refresh(self) -> bool:
        """Read the registry where that is due; whether what this has learned has changed."""
        now = clock.monotonic()
        if now < self._due:
            return False
        self._read, self._due = now, now + EVERY_S
        try:
            found = guests_among(self._connection.hscan_iter(self._keys.tenants, count=_PAGE))
            has_tenants = self._find_tenants()
        except redis.ResponseError as error:  # among others, a user without the right to
            log.warning("cannot read which tenants are guests: %s", error)
            return False
        before = self.names, self.has_tenants
        self.names, self.has_tenants = (*self._fixed, *self._heard(found)), has_tenants
        return before != (self.names, self.has_tenants)

    def _find_tenants(self) -> bool:
        """Whether the registry has a tenant, or one has submitted lately."""
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.hscan(self._keys.tenants, count=1)
        pipeline.hget(self._keys.tally, TENANT_CAME)
        pipeline.time()
        (cursor, some), came_ms, (seconds, _) = pipeline.execute()
        if cursor or some:
            return True
        is_time = came_ms is not None and came_ms.isdigit() and len(came_ms) < _MOST_DIGITS
        return is_time and 0 <= 1000 * (seconds + 1) - int(came_ms) < REMEMBERED_MS

    def _heard(self, found: set[str]) -> Sequence[str]:
        """Those that can be heard beside the others, in order."""
        everybody = found.union(self._fixed)
        heard = []
        for name in sorted(found.difference(self._fixed)):
            if why := why_no_guest(name):
                log.warning("guest %s is not heard: %s", name, why)
            elif other := owner_of(name, everybody):
                log.warning("guest %s is not heard: its name is one of guest %s", name, other)
            else:
                heard.append(name)
        if len(heard) > MOST_GUESTS:
            log.warning("only %d of %d guests are heard", MOST_GUESTS, len(heard))
        return heard[:MOST_GUESTS]
