"""A lock between the processes of a GPU: only one at a time loads a model or falls asleep.

vLLM measures the free memory of the whole GPU before and after these two, and fails if another
process changes it in between. Processes may warm up, wake or unload a model at the same time, but
not while one loads a model or falls asleep.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final

from tokenyard import clock

log = logging.getLogger("tokenyard.worker.engines")

_RETRY_S: Final = 0.05


class DeviceLock:
    """The lock of one GPU, on a file: the kernel releases it when the process dies.

    Without a file, as on a CPU, it never waits. A nested acquisition does nothing.
    """

    def __init__(self, path: Path | None = None, patience_s: float = 600.0) -> None:
        """After ``patience_s`` seconds it logs a warning and continues without the lock."""
        self._path = path
        self._patience_s = patience_s
        self._is_inside = False

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the lock alone."""
        return self._taken(fcntl.LOCK_EX)

    def shared(self) -> AbstractContextManager[None]:
        """Hold the lock together with other shared holders."""
        return self._taken(fcntl.LOCK_SH)

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
        until = clock.monotonic() + self._patience_s
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                return
            if clock.monotonic() >= until:
                log.warning(
                    "another process has been changing this GPU for %g s (start_timeout_s):"
                    " going on beside it",
                    self._patience_s,
                )
                return
            clock.sleep(_RETRY_S)


def lock_of_gpu(gpu: int, patience_s: float) -> DeviceLock:
    """The lock of a GPU, by its number among those visible to this process.

    ``patience_s`` is the longest wait in seconds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[gpu].strip() if gpu < len(visible) and visible[gpu].strip() else str(gpu)
    folder = Path(tempfile.gettempdir()) / f"tokenyard-{os.getuid()}"
    return DeviceLock(folder / f"gpu-{name.replace('/', '-')}.lock", patience_s)


def _open(path: Path) -> int | None:
    """Open or create the file; None, without a lock, if that fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.warning("loads on this GPU may disturb each other: %s", error)
        return None
