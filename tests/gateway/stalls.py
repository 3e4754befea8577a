"""The longest stall of a gateway's event loop.

It is CPU time of the whole process from one call of a timer to the next: what another thread takes
while it has the interpreter counts, and a machine that is busy with something else does not.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from pathlib import Path
from typing import Final

#: Of the timer.
EVERY_S: Final = 0.005


class Stalls:
    """In a file, which the gateway's process writes and a test reads."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._longest = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")

    def take(self) -> float:
        """The longest in seconds since the last call."""
        longest, self._longest[0] = self._longest[0], 0.0
        return longest

    def watch(self) -> None:
        """Begin to measure the running loop, which it is for as long as it runs."""
        self._beat(asyncio.get_running_loop(), time.process_time())

    def _beat(self, loop: asyncio.AbstractEventLoop, before: float) -> None:
        now = time.process_time()
        self._longest[0] = max(self._longest[0], now - before)
        loop.call_later(EVERY_S, self._beat, loop, now)
