"""A program of a chaos run that is ended and restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import psutil

from tokenyard.process.children import start_child, stop_child

_TERM_TIMEOUT_S: Final = 60.0


class Program:
    """A coordinator or controller that can be ended and restarted."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, cores: Collection[int]
    ) -> None:
        self.name = name
        self._command = command
        self._log = log
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[subprocess.Popen[bytes]] = []

    @property
    def pid(self) -> int:
        """Its process id; 0 while it is down."""
        return self._process.pid if self.is_running and self._process else 0

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it if it is down."""
        if self.is_running:
            return
        self._process = start_child(self._command, self._log)
        if self._cores:
            os.sched_setaffinity(self._process.pid, self._cores)
        self._groups.append(self._process)

    def descendants(self) -> list[int]:
        """All its child processes, and theirs."""
        with contextlib.suppress(psutil.Error):
            if self.is_running:
                return [one.pid for one in psutil.Process(self.pid).children(recursive=True)]
        return []

    def has_started(self, pid: int) -> bool:
        """Whether the process is alive and was started by this program, now or before a restart."""
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            group = os.getpgid(pid)
            return (
                pid != group
                and group in [process.pid for process in self._groups]
                and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            )
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait until it ends by itself, at most ``timeout_s``."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def end(self) -> None:
        """End it and all processes that it has left, now or before a restart."""
        for process in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGCONT)
            stop_child(process, _TERM_TIMEOUT_S)
