"""Turns at a GPU: by a file lock of the host, which ends with the process that holds it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import Mock

import pytest

from tokenyard import clock
from worker.engines.device import DeviceLock, lock_of_gpu

Turn = Callable[[DeviceLock], AbstractContextManager[None]]
HOLD = """
import sys
from pathlib import Path
from worker.engines.device import DeviceLock
with DeviceLock(Path(sys.argv[1])).exclusive():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """The lock file of a GPU."""
    return tmp_path / "turns" / "gpu-0.lock"


def waiting(turn: AbstractContextManager[None]) -> threading.Event:
    """A thread that waits for its turn like another process; the event is set when it has it."""
    has_it = threading.Event()

    def take() -> None:
        with turn:
            has_it.set()

    threading.Thread(target=take, daemon=True).start()
    return has_it


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts how often somebody has tried in vain to get a turn."""
    counted, sleep = threading.Semaphore(0), clock.sleep

    def count(seconds: float) -> None:
        counted.release()
        sleep(seconds)

    monkeypatch.setattr(clock, "sleep", count)
    return counted


def waits(has_it: threading.Event, tries: threading.Semaphore) -> bool:
    """Whether it has tried some times in vain, and has no turn."""
    return all(tries.acquire(timeout=60) for _ in range(3)) and not has_it.is_set()


def is_free(turn: AbstractContextManager[None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a turn is available without a wait."""
    with monkeypatch.context() as patched:
        patched.setattr(clock, "sleep", Mock(side_effect=TimeoutError))
        try:
            with turn:
                return True
        except TimeoutError:
            return False


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (DeviceLock.exclusive, DeviceLock.exclusive),
        (DeviceLock.exclusive, DeviceLock.shared),
        (DeviceLock.shared, DeviceLock.exclusive),
    ],
    ids=["load and load", "load and warm-up", "warm-up and load"],
)
def test_one_process_loads_alone(
    lock: Path, tries: threading.Semaphore, first: Turn, second: Turn
) -> None:
    with first(DeviceLock(lock)):
        next_one = waiting(second(DeviceLock(lock)))
        assert waits(next_one, tries)
    assert next_one.wait(60)


def test_several_processes_warm_up_at_the_same_time(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DeviceLock(lock).shared():
        assert is_free(DeviceLock(lock).shared(), monkeypatch)


def test_a_turn_within_a_turn_is_part_of_it(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = DeviceLock(lock)
    with turns.shared(), turns.exclusive():
        assert is_free(DeviceLock(lock).shared(), monkeypatch)


def test_gpus_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DeviceLock(tmp_path / "gpu-0.lock").exclusive():
        assert is_free(DeviceLock(tmp_path / "gpu-1.lock").exclusive(), monkeypatch)


def test_a_turn_ends_with_a_killed_process(lock: Path, tries: threading.Semaphore) -> None:
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        next_one = waiting(DeviceLock(lock).exclusive())
        assert waits(next_one, tries)
        holder.kill()
        assert next_one.wait(60)


def test_no_process_waits_forever(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DeviceLock(lock).exclusive(), DeviceLock(lock, patience_s=0.0).exclusive():
        assert "another process has been changing this GPU for 0 s" in caplog.text


def test_without_a_gpu_no_process_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with DeviceLock().exclusive():
        assert is_free(DeviceLock().exclusive(), monkeypatch)


def test_an_unusable_folder_costs_turns_and_not_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    with DeviceLock(tmp_path / "file" / "gpu-0.lock").exclusive():
        assert "loads on this GPU may disturb each other" in caplog.text


def test_a_gpu_has_a_name_that_all_its_processes_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain = lock_of_gpu(1, 600.0)._path
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    named = lock_of_gpu(1, 600.0)._path

    assert (plain.name, named.name) == ("gpu-1.lock", "gpu-GPU-bb.lock")
    assert plain.parent == named.parent
