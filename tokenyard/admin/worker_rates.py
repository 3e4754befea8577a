"""How fast each worker works, from samples that are taken whenever somebody looks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenyard.admin.history import Throughput, throughput
from tokenyard.admin.snapshot import YardView
from tokenyard.protocol.worker_info import WorkerTotals

#: Least time between two samples; workers report about once a second.
APART_MS: Final = 1_000
#: Time that a rate is taken over, if there are samples for it.
SMOOTH_MS: Final = 10_000
#: An older sample says nothing about now.
OLDEST_MS: Final = 120_000
_MOST: Final = SMOOTH_MS // APART_MS + 1


@dataclass(frozen=True, slots=True)
class _Sample:
    at_ms: int  # the server's clock
    tallies: Mapping[str, WorkerTotals]  # by worker, with its incarnation


class WorkerRates:
    """The last samples of one yard; thread-safe and bounded."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_MOST)
        self._lock = threading.Lock()

    def add(self, view: YardView) -> Mapping[str, Throughput]:
        """Take a sample; the rates by worker, empty while there is only one sample."""
        now = _Sample(view.at_ms, {one.worker: one.info.tally for one in view.living if one.info})
        with self._lock:
            if self._samples and now.at_ms < self._samples[-1].at_ms - OLDEST_MS:
                self._samples.clear()  # the clock was set back
            before = self._before(now.at_ms)
            if not self._samples or now.at_ms - self._samples[-1].at_ms >= APART_MS:
                self._samples.append(now)
        if before is None:
            return {}
        seconds = (now.at_ms - before.at_ms) / 1000
        return {
            worker: throughput(before.tallies.get(worker, WorkerTotals()), tally, seconds)
            for worker, tally in now.tallies.items()
        }

    def _before(self, now_ms: int) -> _Sample | None:
        """The oldest sample within the smoothing, else the newest before it."""
        usable = [one for one in self._samples if APART_MS <= now_ms - one.at_ms <= OLDEST_MS]
        smooth = (one for one in usable if now_ms - one.at_ms <= SMOOTH_MS)
        return next(smooth, usable[-1] if usable else None)
