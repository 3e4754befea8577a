"""The pace of a job, and what the yard's leader shows of it to Prometheus."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Final

import redis

from tokenyard import clock
from tokenyard.batch.state import RequestCounts
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.keys import LINE_STATES, Keys

_WINDOW_S: Final = 30.0
_SAMPLE_S: Final = 0.5
#: Counting is not part of a job, so a slow broker must not delay one for longer.
_PATIENCE_S: Final = 2.0

_log = logging.getLogger("tokenyard.batch")


class LineRate:
    """Lines a second, over the last half minute."""

    def __init__(self, done: int) -> None:
        """``done`` lines are not of this run."""
        self._samples = deque([(clock.monotonic(), done)])

    def per_s(self, done: int) -> float:
        """The rate now, when so many lines are done."""
        now = clock.monotonic()
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        return (done - before) / max(now - since, 1e-3)


class LineCount:
    """Adds the lines of a job to the yard's counters."""

    def __init__(self, url: str, yard: str) -> None:
        self._url = url
        self._tally = Keys(yard).tally
        self._unsent: Counter[str] = Counter()

    def advance(self, before: RequestCounts, after: RequestCounts) -> None:
        """Add what was done in between; after an error it is added with the next call.

        Lines that run again after an error count again.
        """
        for state in LINE_STATES:
            self._unsent[state] += max(0, getattr(after, state) - getattr(before, state))
        try:
            self._send()
        except redis.RedisError as error:
            _log.debug("done lines are counted later: %s", error)

    def _send(self) -> None:
        pending = +self._unsent
        if not pending:
            return
        with open_connection(self._url, timeout_s=_PATIENCE_S, retries=0) as connection:
            pipeline = connection.pipeline()
            for state, count in pending.items():
                pipeline.hincrby(self._tally, f"count:lines:{state}", count)
            pipeline.execute()
        self._unsent.clear()
