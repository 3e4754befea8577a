"""Child processes: stopped in order, by force, or with their parent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_clock import FakeClock
from tests.support.processes import is_gone
from tests.support.waiting import eventually
from tokenyard.process import children
from tokenyard.process.children import start_child, stop_child

Shell = Callable[[str], "children.subprocess.Popen[bytes]"]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Starts a script, and waits until it has said `ready`."""

    def start(script: str) -> children.subprocess.Popen[bytes]:
        log = tmp_path / "log"
        process = start_child(["/bin/sh", "-c", f"{script}"], log)
        eventually(lambda: "ready" in log.read_text())
        return process

    return start


def test_a_willing_child_ends_in_order(shell: Shell) -> None:
    child = shell("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    assert stop_child(child, 60.0) == 5


def test_an_unwilling_child_is_killed_after_its_grace(shell: Shell, fake_clock: FakeClock) -> None:
    child = shell("trap '' TERM; echo ready; while :; do sleep 0.05; done")
    started = fake_clock.now
    assert stop_child(child, 60.0) == -signal.SIGKILL
    assert fake_clock.now - started == pytest.approx(60.0, abs=0.1)


def test_a_hurried_child_gets_sigterm_again(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "HURRY_S", 60.0)
    told = tmp_path / "told"
    on_term = f'trap "exit 6" TERM; echo > {told}'
    child = shell(f"trap '{on_term}' TERM; echo ready; while :; do sleep 0.05; done")
    assert stop_child(child, 60.0, hurry=told.exists) == 6


def test_children_of_a_child_end_with_it(shell: Shell, tmp_path: Path) -> None:
    child = shell(f"sleep 60 & echo $! > {tmp_path}/grandchild; echo ready; wait")
    grandchild = int((tmp_path / "grandchild").read_text())
    stop_child(child, 5.0)
    eventually(lambda: is_gone(grandchild))


def test_it_leads_a_group_of_its_own(shell: Shell) -> None:
    child = shell("echo ready; exec sleep 60")
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    stop_child(child, 5.0)


def test_its_output_is_appended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    child = start_child(["/bin/sh", "-c", "echo out; echo err >&2"], log)
    assert child.wait(60) == 0
    assert log.read_text() == "before\nout\nerr\n"
