"""How fast the yard serves, from which clients get an estimate of their wait."""

from __future__ import annotations

#: Weight of the newest measurement.
NEWEST = 0.3
#: Shortest time (s) of a measurement.
LEAST_S = 0.5


class ServiceRate:
    """Requests per second while requests had to wait: otherwise it would be their arrival rate."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self._count = 0
        self._since = 0.0
        self._always_busy = True

    def count(self, requests: int) -> None:
        """So many were dispatched."""
        self._count += requests

    def note(self, *, busy: bool) -> None:
        """Whether requests wait now."""
        self._always_busy = self._always_busy and busy

    def measure(self, now: float) -> bool:
        """End a measurement, if it is long enough, at ``now`` (s); whether the rate changed."""
        seconds, measured = now - self._since, self._count
        if seconds < LEAST_S:
            return False
        usable = self._always_busy and self._since > 0.0 and measured > 0
        if usable:
            newest = measured / seconds
            old = self.per_s or newest
            self.per_s = NEWEST * newest + (1 - NEWEST) * old
        self._count, self._since, self._always_busy = 0, now, True
        return usable
