"""How many lines have their answer, told to the yard, whose leader shows it to Prometheus."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

import redis

from tokenyard.batch.state import RequestCounts
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.keys import LINE_STATES, Keys

#: Telling is no part of a job, so it holds none up.
_PATIENCE_S: Final = 2.0

_log = logging.getLogger("tokenyard.batch")


class LineCount:
    """Lines that a job has done and not told yet."""

    def __init__(self, url: str, yard: str) -> None:
        self._url = url
        self._tally = Keys(yard).tally
        self._untold: Counter[str] = Counter()

    def advance(self, before: RequestCounts, after: RequestCounts) -> None:
        """Tell what has come in between; what cannot be told now is told with the next.

        Lines that are run once more, since they had failed, count again.
        """
        for state in LINE_STATES:
            self._untold[state] += max(0, getattr(after, state) - getattr(before, state))
        try:
            self._tell()
        except redis.RedisError as fault:
            _log.debug("done lines are counted later: %s", fault)

    def _tell(self) -> None:
        told = +self._untold
        if not told:
            return
        with open_connection(self._url, timeout_s=_PATIENCE_S, retries=0) as connection:
            pipeline = connection.pipeline()
            for state, count in told.items():
                pipeline.hincrby(self._tally, f"count:lines:{state}", count)
            pipeline.execute()
        self._untold.clear()
