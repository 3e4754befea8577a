"""Who may change what a GPU holds: one process at a time loads or falls asleep there.

vLLM measures the free memory of the whole GPU before and after it does so, and fails where another
process has changed it in between. So processes of a GPU that warm up, wake or let go of a model do
that beside each other, but not while one loads a model or falls asleep.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

log = logging.getLogger("tokenyard.worker.engines")

_RETRY_S: Final = 0.05


class DeviceLock:
    """The turns at one GPU, by a lock on a file: it goes with a process that dies.

    Without a file, as on a CPU, everybody goes at once. A turn within a turn is part of it.
    """

    def __init__(self, path: Path | None = None, patience_s: float = 600.0) -> None:
        """After ``patience_s`` seconds of waiting it goes on without a turn, and says so."""
        self._path = path
        self._patience_s = patience_s
        self._is_inside = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other process has a turn meanwhile."""
        with self._taken(fcntl.LOCK_EX):
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Others may have such a turn too, but nobody one alone."""
        with self._taken(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _taken(self, kind: int) -> Iterator[None]:
        if self._is_inside or self._path is None:
            yield
            return
        file = _open(self._path)
        self._is_inside = True
        try:
            if file is not None:
                self._wait(file, kind)
            yield
        finally:
            self._is_inside = False
            if file is not None:
                os.close(file)

    def _wait(self, file: int, kind: int) -> None:
        until = time.monotonic() + self._patience_s
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                return
            if time.monotonic() >= until:
                log.warning(
                    "another process has been changing this GPU for %g s (start_timeout_s):"
                    " going on beside it",
                    self._patience_s,
                )
                return
            time.sleep(_RETRY_S)


def lock_of_gpu(gpu: int, patience_s: float) -> DeviceLock:
    """The turns at a GPU, by its number among those that this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[gpu].strip() if gpu < len(visible) and visible[gpu].strip() else str(gpu)
    folder = Path(tempfile.gettempdir()) / f"tokenyard-{os.getuid()}"
    return DeviceLock(folder / f"gpu-{name.replace('/', '-')}.lock", patience_s)


def _open(path: Path) -> int | None:
    """The file, made where it is not there; None, and no turns, where that cannot be."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.warning("loads on this GPU may disturb each other: %s", error)
        return None
