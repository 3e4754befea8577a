"""The longest stall of a gateway's event loop.

A machine that is busy with something else must not count. So a stall is what is less of two
times from one call of a timer to the next: CPU time of the whole process (what another thread takes
while it has the interpreter is in it), and the time by the clock on the wall in which the loop's
thread did not wait for a core. The latter alone is there to be reported.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

#: Of the timer.
EVERY_S: Final = 0.005


class Times(NamedTuple):
    """Of a thread and its process, in seconds."""

    cpu: float
    wall: float
    waited: float  # for a core

    @classmethod
    def of(cls, pid: int, thread: int) -> Times:
        """Now, of any process."""
        schedule = Path(f"/proc/{pid}/task/{thread}/schedstat").read_bytes()
        # CPUCLOCK_SCHED, as Linux has it.
        cpu = time.clock_gettime(~pid << 3 | 2)
        return cls(cpu, time.perf_counter(), int(schedule.split()[1]) / 1e9)

    def to(self, later: Times) -> float:
        """How long the thread was kept from its work, but not by other processes."""
        return min(later.cpu - self.cpu, later.wall - self.wall - (later.waited - self.waited))


class Stall(NamedTuple):
    """The longest of a time, in seconds; the other by the clock on the wall alone."""

    own_s: float
    wall_s: float


class Stalls:
    """In a file, which the gateway's process writes and a test reads."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._longest = memoryview(mmap.mmap(file.fileno(), 16)).cast("d")

    def take(self) -> Stall:
        """The longest since the last call."""
        found = Stall(*self._longest)
        self._longest[0] = self._longest[1] = 0.0
        return found

    def watch(self) -> None:
        """Begin to measure the running loop, which it is for as long as it runs."""
        self._beat(asyncio.get_running_loop(), _now())

    def _beat(self, loop: asyncio.AbstractEventLoop, before: Times) -> None:
        now = _now()
        self._longest[0] = max(self._longest[0], before.to(now))
        self._longest[1] = max(self._longest[1], now.wall - before.wall)
        loop.call_later(EVERY_S, self._beat, loop, now)


def _now() -> Times:
    return Times.of(os.getpid(), threading.get_native_id())
