"""The fork-server of this program: it imports the engine once, and forks all worker processes.

Python starts it as ``python -c``, which searches the current folder first: a user's own
``worker.py`` there would hide our package. So it is started with a safe path, and with only those
parts of `PYTHONPATH` that this program uses itself.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

from tokenyard.process.home import folder_for_sockets, owned_folder
from tokenyard.protocol.settings import WorkerSettings
from worker.process.main import core_main

log = logging.getLogger("tokenyard.worker.pool")

_SAFE_PATH: Final = "PYTHONSAFEPATH"
_PATHS: Final = "PYTHONPATH"

_context = multiprocessing.get_context("forkserver")
Pipe = _context.Pipe
#: Whether it has started a process since `preload`.
_proven = [False]


def preload(modules: Iterable[str]) -> None:
    """Set what it imports before its first process; set the environment before."""
    _forget_inherited()
    _context.set_forkserver_preload(list(modules))
    _proven[0] = False


def _forget_inherited() -> None:
    """Forget a fork-server that this process has inherited from its parent.

    It is not our child, so Python's check whether it runs would always fail.
    """
    inherited: Any = forkserver._forkserver  # noqa: SLF001  # has no public name
    pid = inherited._forkserver_pid  # noqa: SLF001
    if pid is None:
        return
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        os.close(inherited._forkserver_alive_fd)  # noqa: SLF001
        inherited.__init__()


class ForkedProcess(ForkServerProcess):
    """A process of the fork-server."""

    def start(self) -> None:
        """Start it, and the fork-server if none runs.

        Raises `OSError` or `EOFError`. If the fork-server died of an import, the next one imports
        nothing: each process then imports itself and can report the error.
        """
        try:
            with _safe_paths():
                forkserver.ensure_running()
            super().start()
        except (EOFError, OSError):
            if not _proven[0]:
                log.debug("the next fork-server imports nothing")
                _context.set_forkserver_preload([])
            raise
        _proven[0] = True


class CoreHandle:
    """The core of a process: it has the device and the model, and outlives its fronts."""

    def __init__(
        self, settings: WorkerSettings, name: str, device: int, output: Connection
    ) -> None:
        """Start it; its standard error goes to ``output``.

        Raises `EOFError` or `OSError` where no process can be started.
        """
        self._folder = contextlib.ExitStack()
        folder = self._folder.enter_context(owned_folder("tokenyard-core-", folder_for_sockets()))
        self.address = str(folder / "core")  # where its front connects
        arguments = (settings, device, log.getEffectiveLevel(), self.address, output)
        self.process = ForkedProcess(target=core_main, args=arguments, name=f"{name} core")
        try:
            self.process.start()
        except (EOFError, OSError):
            self._folder.close()
            raise

    def exit_status(self, wait_s: float = 0.0) -> int | None:
        """The status of a core that is dead, or ends within ``wait_s``; None if it lives."""
        self.process.join(wait_s)
        return self.process.exitcode

    def end(self) -> None:
        """Kill it, and leave nothing of it."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self._folder.close()


@contextlib.contextmanager
def _safe_paths() -> Iterator[None]:
    """Change the environment for this start only: the program may start other processes."""
    kept = {name: os.environ.get(name) for name in (_SAFE_PATH, _PATHS)}
    os.environ[_SAFE_PATH] = "1"
    if paths := kept[_PATHS]:
        ours = [path for path in paths.split(os.pathsep) if str(Path(path).absolute()) in sys.path]
        os.environ[_PATHS] = os.pathsep.join(ours)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
