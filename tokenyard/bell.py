"""Something that a signal handler may ring.

`threading.Event` is not: its lock may be held by the very thread that the signal interrupts.
"""

from __future__ import annotations

import contextlib
import select
import socket


class Bell:
    """Wakes whoever waits for it; can be waited for together with other file descriptors."""

    def __init__(self) -> None:
        self._ear, self._hand = socket.socketpair()
        self._ear.setblocking(False)
        self._hand.setblocking(False)

    def fileno(self) -> int:
        """Readable once it has rung."""
        return self._ear.fileno()

    def ring(self) -> None:
        """Wake; what has rung and was not heard yet need not ring louder, nor what is closed."""
        with contextlib.suppress(OSError):
            self._hand.send(b"!")

    def hear(self) -> None:
        """Forget that it rang."""
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def wait(self, timeout_s: float) -> None:
        """Wait until it rings, at most ``timeout_s``."""
        # Not `select.select`: it knows no descriptor above 1023.
        ears = select.poll()
        ears.register(self, select.POLLIN)
        if ears.poll(max(0.0, timeout_s) * 1000):
            self.hear()

    def close(self) -> None:
        """Let go of its descriptors."""
        self._ear.close()
        self._hand.close()
