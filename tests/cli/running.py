"""`tokenyard up` and other commands in separate processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
from click.testing import Result

from tests.support.processes import is_gone
from tests.support.waiting import eventually
from tokenyard.process.program import Exit

ROOT = Path(__file__).parents[2]
#: Below the time that a test may take, so that a failure says what the yard has said.
START_S = 100.0
STOP_S = 60.0
#: Makes standard input the controlling terminal, then becomes the program.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(**more: str) -> dict[str, str]:
    """An environment without the settings of the user who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENYARD")}
    marks = {name: value for name, value in os.environ.items() if name == "TOKENYARD_TEST_RUN"}
    return kept | marks | {"PYTHONPATH": str(ROOT)} | more


def python(
    *words: str,
    timeout_s: float = START_S,
    env: Mapping[str, str] | None = None,
    stdout: Any = subprocess.PIPE,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end."""
    return subprocess.run(
        [sys.executable, *words],
        env=environment(**(env or {})),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
        **options,
    )


def tokenyard(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return python("-m", "tokenyard", *arguments, **options)


class Command:
    """A command that runs until its block ends, and what it has printed."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        python: Sequence[str] = ("-m", "tokenyard"),
        **env: str,
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *python, *arguments],
                env=environment(**env),
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S / 2)
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return self.log.read_text()


def write_program(path: Path, text: str) -> Path:
    """A shell script that stands in for another program."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


@contextmanager
def in_terminal(*arguments: str, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command in a new terminal, and the terminal's other end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, "-m", "tokenyard", *arguments]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(TERM="xterm", **env)
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(ours: int, words: bytes, within_s: float = STOP_S) -> bytes:
    """Read the output up to these words; b"" reads to the end."""
    seen = b""
    until = time.monotonic() + within_s
    while words not in seen or not words:
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other end is closed
            more = b""
        if not more:
            assert not words, seen.decode(errors="replace")
            return seen
        seen += more
        assert time.monotonic() < until, seen.decode(errors="replace")
    return seen


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON of a command that has succeeded."""
    assert done.returncode == Exit.OK, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def objects(done: Any) -> list[dict[str, Any]]:
    """The lines that a command printed as JSON."""
    return [json.loads(line) for line in done.stdout.splitlines()]


class Up:
    """One run of `tokenyard up --json`."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        group: tuple[str, ...] = (),
        data_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        port: bool = True,
    ) -> None:
        self._out = folder / "out"
        self._err = folder / "err"
        self.data_dir = data_dir or folder / "data"
        command = [sys.executable, "-m", "tokenyard", *group, "up", "--json"]
        command += ["--engine", "simulated", "--data-dir", str(self.data_dir)]
        # Ports that nobody uses (two yards that begin at once may find the same one free), and no
        # record where other tests or a user would find it.
        command += ["--http-port", "0", *(["--port", "0"] if port else []), *arguments]
        apart = {"XDG_DATA_HOME": str(folder / "xdg")}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, env=environment(**(apart | dict(env or {}))), stdout=out, stderr=err
            )
        self.family: list[int] = []

    @property
    def said(self) -> str:
        """Its messages for people."""
        return self._err.read_text()

    def wait_ready(self) -> dict[str, object]:
        """Its JSON line."""

        def line() -> str:
            assert self.process.poll() is None, self.said
            text = self._out.read_text()
            assert text.endswith("\n"), f"it is not ready: {self.said}"
            return text

        ready: dict[str, object] = json.loads(eventually(line, timeout_s=START_S))
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.family = [child.pid for child in children]
        return ready

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to `up` only, not to its children."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Its exit status."""
        return self.process.wait(timeout_s)

    def wait_all_gone(self, timeout_s: float = STOP_S) -> None:
        """Wait until all processes that it started have ended."""
        eventually(lambda: all(map(is_gone, self.family)), timeout_s=timeout_s)

    def end(self) -> None:
        """Stop it if it still runs, for clean-up."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


#: A function that runs a command in this process.
Ask = Callable[..., Result]
#: A function that starts a yard for one test.
StartUp = Callable[..., Up]
