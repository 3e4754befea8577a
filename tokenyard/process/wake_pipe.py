"""Something that a signal handler may ring.

`threading.Event` is not: its lock may be held by the very thread that the signal interrupts.
"""

from __future__ import annotations

import contextlib
import os
import select


class WakeupPipe:
    """Wakes whoever waits for it; can be waited for together with other file descriptors."""

    def __init__(self) -> None:
        self._ear, self._hand = os.pipe()
        for end in (self._ear, self._hand):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """Readable once it has rung."""
        return self._ear

    def ring(self) -> None:
        """Wake; what has rung and was not heard yet need not ring louder."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._hand, b"!")

    def hear(self) -> None:
        """Forget that it rang."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._ear, 4096)

    def wait(self, timeout_s: float) -> None:
        """Wait until it rings, at most ``timeout_s``."""
        # Not `select.select`, which knows no descriptor above 1023.
        ears = select.poll()
        ears.register(self._ear, select.POLLIN)
        if ears.poll(max(0.0, timeout_s) * 1000):
            self.hear()

    def __del__(self) -> None:
        # Not before: who still holds it may ring, and would write into whatever has the number now.
        os.close(self._ear)
        os.close(self._hand)
