"""How much a worker has published: counted by its publisher, told with each beat."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from typing import Final

from tokenyard.worker_info import Tally
from worker.engines import Faulted, Finished, TokenDelta
from worker.outcomes import Expired, Outcome, Run

#: The median is of first tokens that are no older, and of so many at most.
WINDOW_S: Final = 60.0
MOST_KEPT: Final = 1000


class RunningTally:
    """Counts from the beginning of a term; written and read by different threads."""

    def __init__(self) -> None:
        self.error = ""  # what the engine could not do the last time
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._finished = 0
        self._tokens = 0
        self._firsts: deque[tuple[float, float]] = deque(maxlen=MOST_KEPT)  # monotonic, ms

    def begin(self) -> None:
        """Another incarnation counts from nothing."""
        with self._lock:
            self._reset()

    def note(self, run: Run, outcome: Outcome) -> None:
        """An outcome that is about to be published; call before ``run`` has counted it."""
        with self._lock:
            if isinstance(outcome, TokenDelta):
                self._tokens += len(outcome.tokens)
            else:
                self._finished += 1
                self._tokens += max(0, _made(outcome) - run.seq)

    def note_first(self, run: Run, now: float) -> None:
        """The first token of a request is there; ``now`` is monotonic."""
        waited_ms = run.assignment.waited_ms + (now - run.began) * 1000
        with self._lock:
            self._firsts.append((now, waited_ms))

    def now(self) -> Tally:
        """The count until now."""
        with self._lock:
            since = time.monotonic() - WINDOW_S
            while self._firsts and self._firsts[0][0] < since:
                self._firsts.popleft()
            waited = [ms for _, ms in self._firsts]
            median = round(statistics.median(waited), 1) if waited else None
            return Tally(finished=self._finished, tokens=self._tokens, ttft_ms=median)


def _made(end: Finished | Faulted | Expired) -> int:
    """Tokens of a request over all its choices, also those of earlier attempts."""
    made = end.made if isinstance(end, Expired) else end
    if not isinstance(made, Finished):
        return 0
    return sum(len(choice.tokens) for choice in made.choices)
