"""A wake-up that is safe in signal handlers.

`threading.Event` is not: the interrupted thread itself may hold its lock.
"""

from __future__ import annotations

import contextlib
import os
import select


class WakeupPipe:
    """A pipe that wakes a waiting thread; can be polled together with other descriptors."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """A descriptor that is readable once the pipe was set."""
        return self._read_end

    def set(self) -> None:
        """Wake the waiting thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"!")

    def clear(self) -> None:
        """Clear the pipe."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)

    def wait(self, timeout_s: float) -> None:
        """Wait until the pipe is set, at most ``timeout_s``, and clear it."""
        # Not `select.select`, which is limited to descriptors below 1024.
        poller = select.poll()
        poller.register(self._read_end, select.POLLIN)
        if poller.poll(max(0.0, timeout_s) * 1000):
            self.clear()

    def __del__(self) -> None:
        # Not earlier: a holder that sets it would write into another file with the same number.
        os.close(self._read_end)
        os.close(self._write_end)
