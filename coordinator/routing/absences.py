"""Absent workers that requests must go to: since when, and how long to wait."""

from __future__ import annotations

import logging
import math

from tokenyard import clock

log = logging.getLogger("tokenyard.coordinator.schedule")


class Absences:
    """Logs once for each worker that it is absent, that the wait for it is over, that it is back.

    ``wait_s`` is the longest wait for a worker; `math.inf` has no end.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._since: dict[tuple[str, str], float] = {}  # by worker and model
        self._given_up: set[tuple[str, str]] = set()

    def is_over(self, worker: str, model: str) -> bool:
        """Whether the wait for an absent worker is over."""
        key, now = (worker, model), clock.monotonic()
        if key not in self._since:
            self._since[key] = now
            bound = "" if math.isinf(self._wait_s) else f", for at most {self._wait_s:g} s"
            log.warning(
                "no worker %s serves %s: its requests, and those behind them, wait for it%s",
                *(worker, model, bound),
            )
        if now - self._since[key] < self._wait_s:
            return False
        if key not in self._given_up:
            self._given_up.add(key)
            log.warning(
                "no worker %s serves %s after %g s: its requests go elsewhere",
                *(worker, model, self._wait_s),
            )
        return True

    def end(self, worker: str, model: str) -> None:
        """The worker is there."""
        if self._since.pop((worker, model), None) is not None:
            self._given_up.discard((worker, model))
            log.info("worker %s serves %s again", worker, model)
