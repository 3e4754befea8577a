"""Forks programs from a process that has imported them, which takes half a second of a core.

A forked program differs from ``python -m MODULE`` in nothing that a test can see: it has its own
arguments, environment, log and ``__main__``, and ends as an interpreter does.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from setproctitle import getproctitle

ROOT = Path(__file__).parents[2]
#: The programs that it has imported.
FORKED = ("coordinator", "worker")
#: What they import when they run, and nothing that it does not.
_IMPORTED = """
import tokenyard.process.program, tokenyard.process.service_manager
import coordinator.coordinator, worker.host.controller
from tests.support import zygote
zygote.serve()
"""
#: Room for the names that programs give to their processes.
_ROOM = "#" * 200
_START_S = 60.0


class Zygote:
    """The process that forks; all threads of a test may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        command = [sys.executable, "-c", _IMPORTED + _ROOM]
        self._process = subprocess.Popen(
            command, cwd=ROOT, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._partial = b""
        self._started: list[int] = []
        self._statuses: dict[int, int] = {}

    def start(self, module: str, words: Sequence[str], log: Path) -> Forked:
        """Start ``python -m MODULE WORDS`` with this process's environment."""
        log.touch()  # for who reads it before the program has opened it
        told = {"module": module, "words": list(words), "log": str(log), "env": dict(os.environ)}
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            until = time.monotonic() + _START_S
            while not self._started:
                self._read(until - time.monotonic())
            return Forked(self, self._started.pop())

    def status(self, pid: int, timeout_s: float) -> int | None:
        """The exit status of a program, as `subprocess` gives it; None while it runs."""
        until = time.monotonic() + timeout_s
        while True:
            with self._lock:
                # In short steps, so that other threads have their turn.
                if pid not in self._statuses:
                    self._read(min(until - time.monotonic(), 0.05), is_optional=True)
                if pid in self._statuses or time.monotonic() >= until:
                    return self._statuses.get(pid)

    def _read(self, timeout_s: float, *, is_optional: bool = False) -> None:
        output: Any = self._process.stdout
        if not select.select([output], [], [], max(timeout_s, 0.0))[0]:
            assert is_optional, "the process that forks programs does not answer"
            return
        read = os.read(output.fileno(), 65536)
        assert read, "the process that forks programs has died"
        *lines, self._partial = (self._partial + read).split(b"\n")
        for line in lines:
            pid, *ended = map(int, line.split())
            if ended:
                (self._statuses[pid],) = ended
            else:
                self._statuses.pop(pid, None)  # of an earlier process with this number
                self._started.append(pid)

    def stop(self) -> None:
        """End it; programs go on."""
        with self._process:
            self._process.kill()


class Forked:
    """A program, with a part of the API of `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote = zygote
        self.pid = pid

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._zygote.status(self.pid, 0.0)

    def wait(self, timeout_s: float) -> int:
        """Its exit status; raises `subprocess.TimeoutExpired`."""
        status = self._zygote.status(self.pid, timeout_s)
        if status is None:
            raise subprocess.TimeoutExpired(f"program {self.pid}", timeout_s)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@functools.cache
def the_zygote() -> Zygote:
    """That of this test process, which starts with the first program."""
    return Zygote()


def stop_zygote() -> None:
    """End it, if it was started."""
    if the_zygote.cache_info().currsize:
        the_zygote().stop()
        the_zygote.cache_clear()


# In the new process


def serve() -> None:
    """Fork a program for each line, until there are no more; in the program, run it."""
    getproctitle()  # finds the place of the title, which a changed environment would hide
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup, waker = os.pipe()
    for end in (wakeup, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker)
    partial = b""
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _report_ends()
        if 0 in ready:
            if not (read := os.read(0, 1 << 20)):
                os._exit(0)
            *lines, partial = (partial + read).split(b"\n")
            for line in lines:
                if pid := os.fork():
                    os.write(1, b"%d\n" % pid)
                else:
                    signal.set_wakeup_fd(-1)
                    os.close(wakeup)
                    os.close(waker)
                    return _become(**json.loads(line))


def _report_ends() -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            os.write(1, b"%d %d\n" % (ended[0], os.waitstatus_to_exitcode(ended[1])))


def _become(module: str, words: Sequence[str], log: str, env: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *[(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)] * 2]
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    tempfile.tempdir = None
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
