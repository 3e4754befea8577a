"""Ctrl-C and unread output at any moment: no traceback, and the right exit status."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.cli.running import Up, in_terminal, python, read_until, tokenyard
from tests.support.waiting import eventually
from tokenyard.process.interrupted import Interrupted, Interrupts
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.yard.snapshot import read_yard

END_S = 60.0
#: Runs the command and interrupts it during an import or at another odd moment.
AT_IMPORT = """
import os, signal, sys
class Interrupter:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
import tokenyard.__main__
sys.meta_path.insert(0, Interrupter())
tokenyard.__main__.run()
"""
AT_THE_END = """
import atexit, os, signal, tokenyard.__main__
atexit.register(os.kill, os.getpid(), signal.SIGINT)
tokenyard.__main__.run()
"""
AT_THE_FLUSH = """
import os, signal, tokenyard.__main__
tokenyard.__main__._flush = lambda: os.kill(os.getpid(), signal.SIGINT)
tokenyard.__main__.run()
"""
IN_A_FINALIZER = """
import os, signal, tokenyard.__main__
class Victim:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass
import tokenyard.process.program
before = tokenyard.process.program._refuse_bytes
def refuse(arguments):
    Victim()
    before(arguments)
tokenyard.process.program._refuse_bytes = refuse
tokenyard.__main__.run()
"""


@pytest.mark.parametrize(
    "name", ["click", "tokenyard.cli", "redis", "tokenyard.cli.submit", "rich.console"]
)
def test_ctrl_c_during_imports_is_an_interrupt(name: str) -> None:
    command = "submit" if name != "rich.console" else "info"
    done = python("-c", AT_IMPORT.format(name=name), "--redis-url", "redis://127.0.0.1:1", command)
    assert done.returncode == Exit.INTERRUPTED, done.stderr
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("text", [AT_THE_END, AT_THE_FLUSH, IN_A_FINALIZER])
def test_ctrl_c_at_an_odd_moment_prints_no_traceback(text: str) -> None:
    done = python("-c", text, "completion", "bash")
    assert done.returncode == Exit.INTERRUPTED, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def press_ctrl_c(ours: int) -> None:
    os.write(ours, b"\x03")


def press_ctrl_c_until_it_ends(process: subprocess.Popen[bytes], ours: int) -> int:
    """Press Ctrl-C until the program ends; its status.

    CPython's `input` may see a signal that comes just before it reads only with the next one. One
    that comes when the program is ending kills it, so it has time to end.
    """
    for _ in range(3):
        press_ctrl_c(ours)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(END_S / 3)
    raise AssertionError("Ctrl-C does not end it")


@pytest.mark.parametrize("command", [["info"], ["submit", "hello"], ["models", "list"]])
def test_ctrl_c_ends_the_wait_for_a_silent_server(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(END_S)
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with in_terminal("--redis-url", url, *command) as (process, ours):
            connection, _ = silent.accept()
            with connection:
                press_ctrl_c(ours)
                shown = read_until(ours, b"")
                assert process.wait(END_S) == Exit.INTERRUPTED
        assert b"Traceback" not in shown


def test_ctrl_c_ends_the_wait_for_an_answer(yard: dict[str, Any]) -> None:
    arguments = ["--redis-url", yard["url"], "submit", "--stream", "--max-tokens", "5000", "long"]
    arguments.append("--cancel-on-disconnect")
    with redis.Redis.from_url(yard["url"]) as connection, in_terminal(*arguments) as (process, at):
        assert os.read(at, 1)  # the first token
        press_ctrl_c(at)
        assert b"Traceback" not in read_until(at, b"")
        assert process.wait(END_S) == Exit.INTERRUPTED
        eventually(
            lambda: not any(one.lane for one in read_yard(Yard(connection, Keys("main"))).workers)
        )


@pytest.mark.long
def test_ctrl_c_at_a_question_is_no_answer(yard: dict[str, Any]) -> None:
    """Ctrl-C is no answer: I expect another status than for "no"."""
    with in_terminal("--redis-url", yard["url"], "stop") as (process, ours):
        read_until(ours, b"[y/N]")
        assert press_ctrl_c_until_it_ends(process, ours) == Exit.INTERRUPTED
    with in_terminal("--redis-url", yard["url"], "stop") as (process, ours):
        read_until(ours, b"[y/N]")
        os.write(ours, b"n\n")
        assert process.wait(END_S) == Exit.FAILED


# Ctrl-C again


def test_a_second_signal_before_a_hold_hurries() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        assert not interrupts.is_hurried
        signal.raise_signal(signal.SIGINT)
        interrupts.hold()
        assert interrupts.is_hurried


def test_a_signal_during_a_hold_hurries() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        assert not interrupts.is_hurried
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.is_hurried


@pytest.mark.long
def test_two_signals_stop_up_without_grace(start_up: Any) -> None:
    """Given a request that would run for minutes, I expect no grace period."""
    up: Up = start_up(
        "--workers", "1", "--grace-s", "300", env={"TOKENYARD_WORKER_SIMULATED_STEP_S": "0.05"}
    )
    url = str(up.wait_ready()["url"])
    # A timeout leaves the request running
    done = tokenyard("--redis-url", url, "submit", "--timeout", "0.5", "--max-tokens", "8000", "a")
    assert done.returncode == Exit.TIMEOUT, done.stderr
    up.signal(signal.SIGINT)
    up.signal(signal.SIGTERM)  # another signal: the kernel merges two equal ones
    assert up.wait() == Exit.OK  # within its bound, far below the grace
    up.wait_all_gone()


@pytest.mark.long
def test_up_stops_immediately_during_its_start(start_up: Any) -> None:
    up: Up = start_up("--grace-s", "300", env={"TOKENYARD_WORKER_SIMULATED_LOAD_S": "200"})
    eventually(lambda: "of 2 workers are ready" in up.said, timeout_s=END_S)
    up.signal(signal.SIGINT)
    assert up.wait() == Exit.OK  # within its bound, far below the grace
    assert "Stopping." in up.said
    assert "Traceback" not in up.said


# Unread output


@pytest.mark.long
@pytest.mark.parametrize("command", [["info"], ["info", "--json"], ["--help"], ["info", "-h"]])
def test_a_closed_pipe_prints_no_traceback(yard: dict[str, Any], command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = tokenyard("--redis-url", yard["url"], *command, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == Exit.FAILED
    assert done.stderr == ""


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
@pytest.mark.parametrize("command", [["info"], ["info", "--json"], ["completion", "bash"]])
def test_a_full_disk_is_one_line(yard: dict[str, Any], command: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = tokenyard("--redis-url", yard["url"], *command, stdout=full)
    assert done.returncode == Exit.FAILED
    assert done.stderr == "Error: No space left on device\n"
