"""Shows how many tokens wait in `info`, for clients that look there, and takes in what some write.

Clients of an older release count in `info` itself; what they add is added to the count in `tally`.
"""

from __future__ import annotations

from typing import Any

import redis

from tokenyard.keys import Keys
from tokenyard.streams import whole

FIELD = "queued_tokens"


class QueuedTokens:
    """Keeps the two counts alike; for the leader."""

    def __init__(self, connection: redis.Redis, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._shown: int | None = None  # as `info` had it last

    def begin(self) -> None:
        """Another may have led meanwhile."""
        self._shown = None

    def run_once(self) -> None:
        """Take in what was added in `info`, and show the sum there."""
        found: Any = self._connection.hget(self._keys.info, FIELD)
        seen = whole(found)
        pipeline = self._connection.pipeline(transaction=False)
        if self._shown is not None and seen != self._shown:
            pipeline.hincrby(self._keys.tally, FIELD, seen - self._shown)
        pipeline.hget(self._keys.tally, FIELD)
        waiting = max(0, whole(pipeline.execute(raise_on_error=False)[-1]))
        if waiting != seen or found is None:
            self._connection.hset(self._keys.info, FIELD, waiting)
        self._shown = waiting
