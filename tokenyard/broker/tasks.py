"""Tasks that talk to the server: loops that no error ends, and the end of tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from tokenyard import clock
from tokenyard.broker.connection import BLOCK_MARGIN_S
from tokenyard.broker.outage import Outage
from tokenyard.protocol.errors import TokenyardError

_CANCEL_EVERY_S: Final = 0.05


class BackgroundLoop:
    """Repeats a turn in a task of its own; after an error, also one nobody foresaw, a bit later."""

    def __init__(self, turn: Callable[[], Awaitable[None]], what: str, log: logging.Logger) -> None:
        """``what`` it does, for logs and probes, such as "reading replies"."""
        self._turn = turn
        self._what = what
        self._outage = Outage(log, what)
        self._fault = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name=self._what)

    async def stop(self, within_s: float = BLOCK_MARGIN_S) -> None:
        """End; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_task(task, within_s)

    def fault(self) -> str:
        """Why a restart of the program would help: the task is gone, or cannot take its turn."""
        if self._task is not None and self._task.done():
            return f"{self._what} has ended"
        return self._fault

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception as error:  # noqa: BLE001 - its log has what nobody foresaw
                # A broker that is away comes back without a restart.
                is_known = isinstance(error, TokenyardError)
                self._fault = "" if is_known else f"{self._what} fails: {error!r}"
                await clock.pause(self._outage.note(error))
            else:
                self._fault = ""
                self._outage.over()


async def first_of(*works: Awaitable[Any]) -> set[asyncio.Future[Any]]:
    """Wait until one of some tasks or coroutines has ended, and cancel the others.

    Returns those that have ended, perhaps by an error.
    """
    running: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    try:
        return (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]
    finally:
        for one in running:
            one.cancel()


async def end_task(task: asyncio.Task[Any], within_s: float = BLOCK_MARGIN_S) -> None:
    """Cancel a task and wait until it has ended.

    The cancellation is repeated, because redis-py loses one that comes while it connects, or as the
    time-out of a read.
    """
    give_up = clock.monotonic() + within_s
    while not task.done() and clock.monotonic() < give_up:
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_EVERY_S)
