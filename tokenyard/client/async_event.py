"""Waits of the asynchronous client: for what the listener brings, and no longer than allowed."""

from __future__ import annotations

import asyncio


class AsyncEvent:
    """Says that something has come, to one task of one event loop; each wait has a bound.

    `asyncio.wait_for` makes a task for each wait, and a timer for each wait costs as much as the
    wait: a streamed token is one. So one timer serves many, and looks again when it rings early.
    """

    __slots__ = ("_due", "_has_come", "_loop", "_rings_at", "_timer", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_come = False
        self._waiter: asyncio.Future[None] | None = None
        self._due = self._rings_at = 0.0  # in the loop's time
        self._timer: asyncio.TimerHandle | None = None

    def come(self, _: object = None) -> None:
        """Something has come; from whom does not matter."""
        self._has_come = True
        self._wake()

    def clear(self) -> None:
        """What has come until now was seen."""
        self._has_come = False

    async def wait(self, timeout_s: float) -> None:
        """Wait for what has not been seen, at most so long."""
        if self._has_come or timeout_s <= 0:
            return
        self._due = self._loop.time() + timeout_s
        if self._timer is None or self._due < self._rings_at:
            self._arm()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self.close()
        self._rings_at = self._due
        self._timer = self._loop.call_at(self._rings_at, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._due:
            self._arm()
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
