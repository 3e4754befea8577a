"""The pause before a dead worker process is started again."""

from __future__ import annotations

from typing import Final

from redis.backoff import ExponentialWithJitterBackoff

#: A process that lived this long before it died resets the count of failures.
HEALTHY_S: Final = 60.0
#: After this many deaths in a row the process is shown as failed while it pauses.
CRASH_LOOP: Final = 5
#: This many deaths in a row while serving cost only the shortest pause: the search for a request
#: that kills engines takes several, and other requests wait meanwhile.
MOST_IN_SERVICE: Final = 10


class RestartBackoff:
    """Pauses that grow with each failure in a row."""

    def __init__(self, base_s: float, cap_s: float) -> None:
        self._backoff = ExponentialWithJitterBackoff(cap=cap_s, base=base_s)
        self._failures = 0
        self._deaths_in_service = 0  # in a row

    @property
    def is_crash_loop(self) -> bool:
        """Whether the last starts all failed."""
        return self._failures >= CRASH_LOOP

    def reset(self) -> None:
        """Forget the failures: the process was replaced on purpose."""
        self._failures = 0

    def failed_start(self) -> float:
        """The pause in seconds after a process that could not be started."""
        self._failures += 1
        return self._pause_s()

    def died(self, *, was_healthy: bool, was_serving: bool) -> float:
        """The pause in seconds after a death."""
        if was_healthy:
            self._deaths_in_service = 0
            self._failures = 1
        elif was_serving and self._deaths_in_service < MOST_IN_SERVICE:
            self._deaths_in_service += 1
            self._failures = 1
        else:
            self._failures += 1
        return self._pause_s()

    def _pause_s(self) -> float:
        return self._backoff.compute(self._failures)
