"""The standard error of a worker process: passed on, with the last lines kept.

A killed process cannot report why. Its last lines have what C++ libraries wrote, and the stack at
the time of a signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

log = logging.getLogger("tokenyard.worker.pool")

_STDERR: Final = 2
_REMEMBERED: Final = 100
_READ_BYTES: Final = 65536
#: Reads in a row before other processes have their turn.
_MOST_READS: Final = 16
#: The first line of `faulthandler`; nothing but its stack follows.
_CRASH: Final = b"Fatal Python error: "


class Output:
    """The read end of one process's standard error."""

    def __init__(self, pipe: Connection) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe: Connection | None = pipe  # to wait for; None at its end
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=_REMEMBERED)
        self._crash: deque[str] = deque(maxlen=_REMEMBERED)
        self._is_crashing = False

    @property
    def lines(self) -> Sequence[str]:
        """The last lines."""
        return tuple(self._lines)

    @property
    def crash(self) -> Sequence[str]:
        """The stack at the signal that ended the process."""
        return tuple(self._crash)

    def pass_on(self) -> None:
        """Read what is available and write its lines to our own standard error."""
        for _ in range(_MOST_READS):  # a process that writes all the time must not block the pool
            if self.pipe is None:
                return
            try:
                found = os.read(self.pipe.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            if not found:
                self.close()
                return
            *whole, self._rest = (self._rest + found).split(b"\n")
            if len(self._rest) > _READ_BYTES:  # not a line, but a progress bar
                whole, self._rest = [*whole, self._rest], b""
            self._take(whole)

    def begin_again(self) -> None:
        """What comes now is of the next process that writes to this pipe."""
        self.pass_on()
        self._lines.clear()
        self._crash.clear()
        self._is_crashing = False

    def close(self) -> None:
        """Close the pipe; idempotent."""
        if self._rest:
            self._take([self._rest])
        self._rest = b""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def _take(self, lines: Sequence[bytes]) -> None:
        shown = []
        for line in lines:
            self._is_crashing = self._is_crashing or line.startswith(_CRASH)
            text = line.decode(errors="replace").rstrip()
            (self._crash if self._is_crashing else self._lines).append(text)
            if not self._is_crashing or log.isEnabledFor(logging.DEBUG):
                shown.append(line + b"\n")
        with contextlib.suppress(OSError):  # nobody reads us any more
            _write(b"".join(shown))


def log_place() -> str:
    """Where our own standard error goes, for messages that refer to the log."""
    try:
        target = str(Path(f"/proc/self/fd/{_STDERR}").readlink())
    except OSError:  # no Linux
        return "above"
    if os.environ.get("JOURNAL_STREAM") and target.startswith("socket:"):
        return "in the journal (journalctl)"
    is_file = target.startswith("/") and not target.startswith("/dev/") and Path(target).exists()
    return target if is_file else "above"


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(_STDERR, data) :]
