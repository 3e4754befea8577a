"""Reads of the yard: in threads, a bounded number at once, and one for all who look at a page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from tokenyard.board.yard import Yard
from tokenyard.broker.connection import open_connection, translated
from tokenyard.protocol.keys import Keys

T = TypeVar("T")

#: Reads at once; more wait.
_THREADS: Final = 4
#: So long a read is used again: all who look at a page cost the broker as much as one.
_FRESH_S: Final = 1.0
_MOST_KEPT: Final = 64


class YardReader:
    """Runs functions on the yard, off the event loop."""

    def __init__(self, redis_url: str, yard: str) -> None:
        connection = open_connection(redis_url, retries=1, max_connections=2 * _THREADS)
        self._yard = Yard(connection, Keys(yard), redis_url)
        self._limit: anyio.CapacityLimiter | None = None
        self._kept: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}

    async def run(self, function: Callable[[Yard], T]) -> T:
        """Its result; raises `TokenyardError` for what the broker refuses."""
        if self._limit is None:
            self._limit = anyio.CapacityLimiter(_THREADS)
        return await anyio.to_thread.run_sync(self._run, function, limiter=self._limit)

    async def shared(self, key: Hashable, function: Callable[[Yard], T]) -> T:
        """The same, one call for all who ask for ``key`` at about the same time."""
        began, kept = self._kept.get(key, (0.0, None))
        if kept is None or time.monotonic() - began > _FRESH_S:
            self._forget()
            kept = asyncio.ensure_future(self.run(function))
            self._kept[key] = time.monotonic(), kept
        return await asyncio.shield(kept)

    def _run(self, function: Callable[[Yard], T]) -> T:
        with translated(self._yard.url):
            return function(self._yard)

    def _forget(self) -> None:
        if len(self._kept) >= _MOST_KEPT:
            self._kept = {key: one for key, one in self._kept.items() if not one[1].done()}

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._yard.connection.close()
