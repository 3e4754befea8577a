"""An event for one task, with a time-out for each wait and without a timer for each."""

from __future__ import annotations

import asyncio


class AsyncEvent:
    """`asyncio.Event` for one waiting task, whose `wait` has a time-out.

    `asyncio.wait_for` makes a task for each wait, and a timer for each wait costs as much as the
    wait for a streamed token itself. So one timer serves many waits, and is set again when it fires
    too early.
    """

    __slots__ = ("_due", "_fires_at", "_is_set", "_loop", "_timer", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None
        self._due = self._fires_at = 0.0  # in the loop's time
        self._timer: asyncio.TimerHandle | None = None

    def set(self, _: object = None) -> None:
        """Set the event; the argument is that of a listener, and ignored."""
        self._is_set = True
        self._wake()

    def clear(self) -> None:
        """Clear the event."""
        self._is_set = False

    async def wait(self, timeout_s: float) -> None:
        """Wait until the event is set, at most ``timeout_s``."""
        if self._is_set or timeout_s <= 0:
            return
        self._due = self._loop.time() + timeout_s
        if self._timer is None or self._due < self._fires_at:
            self._arm()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self.close()
        self._fires_at = self._due
        self._timer = self._loop.call_at(self._fires_at, self._on_timer)

    def _on_timer(self) -> None:
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
