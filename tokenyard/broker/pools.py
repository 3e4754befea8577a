"""Bounded pools of connections: while all of them are in use, a caller waits for one.

redis-py's default pools raise "Too many connections" immediately. Its blocking pools wait; the
synchronous one is used here with a faster queue. The asynchronous one is not used: a caller that is
cancelled at the wrong moment removes a place from it for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from queue import Empty, Full
from typing import Any, Final

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.connection import AbstractConnection

#: redis-py's own defaults.
DEFAULT_MAX_CONNECTIONS: Final = 50
DEFAULT_POOL_TIMEOUT_S: Final = 20.0


def _all_in_use(most: int, timeout_s: float) -> exceptions.MaxConnectionsError:
    return exceptions.MaxConnectionsError(
        f"all {most} connections were in use for {timeout_s:g} s: do less at once, or raise"
        " max_connections or pool_timeout_s"
    )


def _check(max_connections: int, timeout_s: float) -> None:
    if max_connections < 1 or not timeout_s >= 0:
        raise ValueError("max_connections must be at least 1, the time to wait for one at least 0")


class IdleConnections:
    """Idle connections, the last used one first; takes no lock unless a caller has to wait.

    The queue of `WaitingPool`, with the methods of `queue.LifoQueue` that redis-py calls. Appending
    to a list and popping from its end is safe without a lock.
    """

    def __init__(self, maxsize: int) -> None:
        self.queue: list[Any] = []
        self._maxsize = maxsize
        self._waiting = 0
        self._added = threading.Condition()

    def put_nowait(self, connection: Any) -> None:
        """Add a connection, None for one that is not made yet; raises `Full`."""
        if len(self.queue) >= self._maxsize:
            raise Full
        self.queue.append(connection)
        if self._waiting:
            with self._added:
                self._added.notify()

    def take(self) -> Any:
        """The connection that was used last; None where all existing ones are in use."""
        connection = None
        with contextlib.suppress(IndexError):
            connection = self.queue.pop()
            if connection is None:
                self.put_nowait(None)
        return connection

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Wait for a connection; raises `redis.exceptions.MaxConnectionsError`."""
        if taken := self._pop():
            return taken[0]
        if not block:
            raise Empty
        wait_s = min(threading.TIMEOUT_MAX, math.inf if timeout is None else timeout)
        with self._added:
            self._waiting += 1
            try:
                if taken := self._added.wait_for(self._pop, wait_s):
                    return taken[0]
            finally:
                self._waiting -= 1
        raise _all_in_use(self._maxsize, wait_s)

    def _pop(self) -> list[Any]:
        """The connection that was used last, which may be None, in a list; else an empty list."""
        with contextlib.suppress(IndexError):
            return [self.queue.pop()]
        return []


class WaitingPool(redis.BlockingConnectionPool):
    """A pool for threads; ``timeout`` is in seconds, as in redis-py's."""

    def __init__(self, *, max_connections: int, timeout: float, **options: Any) -> None:
        _check(max_connections, timeout)
        bounds = {"max_connections": max_connections, "timeout": timeout}
        super().__init__(queue_class=IdleConnections, **bounds, **options)  # type: ignore[no-untyped-call]


class AsyncWaitingPool(redis.asyncio.ConnectionPool):
    """A pool for tasks; ``timeout`` is in seconds, as in redis-py's."""

    def __init__(self, *, max_connections: int, timeout: float, **options: Any) -> None:
        _check(max_connections, timeout)
        super().__init__(max_connections=max_connections, **options)
        self._timeout_s = timeout
        self._places = asyncio.Semaphore(max_connections)

    async def get_connection(self, *_: Any, **__: Any) -> AbstractConnection:
        """Wait for a connection; raises `redis.exceptions.MaxConnectionsError`."""
        await self._take_place()
        connection: AbstractConnection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()  # without a timer
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise _all_in_use(self.max_connections, self._timeout_s) from None

    async def release(self, connection: Any) -> None:
        """Return a connection to the pool."""
        try:
            await super().release(connection)
        finally:
            self._places.release()
