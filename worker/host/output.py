"""What a worker process writes to its standard error: passed on, and its end remembered.

A process that is killed cannot say why. What C++ libraries wrote last, and where it was when a
signal came, are in these lines.
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
#: Reads in a row; then others have their turn.
_MOST_READS: Final = 16
#: With this line `faulthandler` begins; what follows is the last that a process writes.
_CRASH: Final = b"Fatal Python error: "


class Output:
    """The read end of one process's standard error."""

    def __init__(self, pipe: Connection) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe: Connection | None = pipe
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=_REMEMBERED)
        self._crash: deque[str] = deque(maxlen=_REMEMBERED)
        self._is_crashing = False

    @property
    def pipe(self) -> Connection | None:
        """To wait for; None where nothing more can come."""
        return self._pipe

    @property
    def lines(self) -> Sequence[str]:
        """The last lines."""
        return tuple(self._lines)

    @property
    def crash(self) -> Sequence[str]:
        """Where the process was when a signal ended it."""
        return tuple(self._crash)

    def pass_on(self) -> None:
        """Take what there is and write it to our own standard error, line by line."""
        for _ in range(_MOST_READS):  # one that writes all the time must not keep the pool
            if self._pipe is None:
                return
            try:
                found = os.read(self._pipe.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            if not found:
                self.close()
                return
            *whole, self._rest = (self._rest + found).split(b"\n")
            if len(self._rest) > _READ_BYTES:  # no line, but what a progress bar writes
                whole, self._rest = [*whole, self._rest], b""
            self._take(whole)

    def close(self) -> None:
        """Nothing more is wanted; idempotent."""
        if self._rest:
            self._take([self._rest])
        self._rest = b""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

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
    """Where our own standard error goes, for whoever wants to read what was before."""
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
