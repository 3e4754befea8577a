"""Ends tasks that talk to the server."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from tokenyard import clock
from tokenyard.broker.connection import BLOCK_MARGIN_S

_CANCEL_EVERY_S: Final = 0.05


async def end_task(task: asyncio.Task[Any], within_s: float = BLOCK_MARGIN_S) -> None:
    """Cancel a task and wait until it has ended.

    The cancellation is repeated, because redis-py loses one that comes while it connects, or as the
    time-out of a read.
    """
    give_up = clock.monotonic() + within_s
    while not task.done() and clock.monotonic() < give_up:
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_EVERY_S)
