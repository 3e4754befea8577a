"""Counts what a server is asked to do."""

from __future__ import annotations

from typing import Any

import redis


class Calls:
    """Commands that the server was sent, by their names."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._before = self._all()

    def _all(self) -> dict[str, int]:
        found: Any = self._connection.info("commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in found.items()}

    def made(self) -> dict[str, int]:
        """Since the beginning, without those that count them."""
        now = self._all()
        return {
            name: calls - self._before.get(name, 0)
            for name, calls in now.items()
            if calls > self._before.get(name, 0) and name not in {"info", "hello", "ping"}
        }
