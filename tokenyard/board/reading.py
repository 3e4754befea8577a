"""Reads of the yard: in threads, a bounded number at once, and one for all who look at a page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from tokenyard import clock
from tokenyard.broker.connection import open_connection, translated
from tokenyard.protocol.keys import Keys, Yard

T = TypeVar("T")

#: How long a read is used again: all who look at a page cost the broker as much as one.
_FRESH_S: Final = 1.0
_MOST_KEPT: Final = 64
#: Functions that may wait for a thread.
_MOST_WAITING: Final = 200
#: Longest wait for one answer of the broker.
_ANSWER_S: Final = 5.0


class Busy(Exception):
    """More is asked than the board does at once. Nothing has been done."""


class YardReader:
    """Runs functions on the yard, off the event loop.

    Its threads are its own, so that a slow broker takes none from a gateway.
    """

    def __init__(self, redis_url: str, yard: str, *, most_at_once: int, wait_s: float) -> None:
        connection = open_connection(
            redis_url, retries=1, timeout_s=_ANSWER_S, max_connections=2 * most_at_once
        )
        self._yard = Yard(connection, Keys(yard), redis_url)
        self._pool = ThreadPoolExecutor(most_at_once, thread_name_prefix="board")
        self._wait_s = wait_s
        self._most = most_at_once + _MOST_WAITING
        self._lock = threading.Lock()
        self._open = 0  # functions that run or wait
        self._kept: dict[Hashable, _Read] = {}

    async def run(self, function: Callable[[Yard], T]) -> T:
        """Its result.

        Raises `Busy` if it does not begin in time, and `TokenyardError` for what the broker
        refuses. What has begun runs to its end, even if nobody waits for it any more.
        """
        return await self._ended(self._begin(function))

    async def shared(self, key: Hashable, function: Callable[[Yard], T]) -> T:
        """Like `run`, but one call serves all who ask for ``key`` at about the same time."""
        read = self._kept.get(key)
        if read is None or read.is_stale:
            self._kept = {key: one for key, one in self._kept.items() if not one.is_stale}
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()  # these are asked again, no more
            self._kept[key] = read = _Read(self._begin(function))
        return await self._ended(read.future)

    def forget(self) -> None:
        """Share no read that began before now: something has changed."""
        self._kept.clear()

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._yard.connection.close()

    def _begin(self, function: Callable[[Yard], T]) -> Future[T]:
        with self._lock:
            if self._open >= self._most:
                raise Busy("the board is busy: try again in a moment")
            self._open += 1
        future = self._pool.submit(self._run, function)
        future.add_done_callback(self._over)
        return future

    async def _ended(self, future: Future[T]) -> T:
        """Wait for it. Whoever is cancelled meanwhile leaves it to the others."""
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(_look_at)
        await asyncio.wait({waiting}, timeout=self._wait_s)
        if future.cancel() or future.cancelled():
            raise Busy("the board is busy with other reads: try again in a moment")
        await asyncio.wait({waiting})
        return waiting.result()

    def _run(self, function: Callable[[Yard], T]) -> T:
        with translated(self._yard.url):
            return function(self._yard)

    def _over(self, _: Future[Any]) -> None:
        with self._lock:
            self._open -= 1


class _Read:
    """A read that several wait for. It is fresh until a time after its end."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future
        self._ended_at = float("inf")
        future.add_done_callback(self._note)

    @property
    def is_stale(self) -> bool:
        """Whether it must be done again."""
        return clock.monotonic() - self._ended_at > _FRESH_S

    def _note(self, future: Future[Any]) -> None:
        self._ended_at = float("-inf") if future.cancelled() else clock.monotonic()


def _look_at(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a read for which nobody waits any more, or asyncio would log it."""
    if not future.cancelled():
        future.exception()
