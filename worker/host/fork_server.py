"""The fork-server of this program: it has imported the engine, and all worker processes are its.

Python starts it as ``python -c``, which looks for modules in the current folder first: a user's own
``worker.py`` there would be taken for our package. So it is started with a safe path, and of
`PYTHONPATH` with what this program itself looks into.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

log = logging.getLogger("tokenyard.worker.pool")

_SAFE_PATH: Final = "PYTHONSAFEPATH"
_PATHS: Final = "PYTHONPATH"

_context = multiprocessing.get_context("forkserver")
#: Whether it has started a process since it was told what to import.
_proven = [False]


def preload(modules: Iterable[str]) -> None:
    """What it imports before its first process; set the environment before."""
    _forget_inherited()
    _context.set_forkserver_preload(list(modules))
    _proven[0] = False


def _forget_inherited() -> None:
    """Forget a fork-server that a parent has started, and that this process was forked with.

    It is no child of ours, so Python's own look at whether it runs fails for ever.
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


class Process(ForkServerProcess):
    """A process that is forked from it."""

    def start(self) -> None:
        """Start it, and the fork-server where none runs.

        Raises `OSError` or `EOFError` where that cannot be. A fork-server that died of what it
        imported is told to import nothing: each process then does so itself, and can say why not.
        """
        try:
            with _safe_paths():
                forkserver.ensure_running()
            super().start()
        except (EOFError, OSError):
            if not _proven[0]:
                log.debug("the fork-server imports nothing from now on")
                _context.set_forkserver_preload([])
            raise
        _proven[0] = True


class ForkServer:
    """What a pool needs of it."""

    Pipe = staticmethod(_context.Pipe)
    Process = Process


@contextlib.contextmanager
def _safe_paths() -> Iterator[None]:
    """For what is started meanwhile only: the program around us may start others of its own."""
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
