"""Handles of processes, and a pool whose processes the test plays, with a recording owner."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

import worker.host.process_handle
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.scripts.answers import Why
from worker.engines import EngineInfo, Memory
from worker.host.allocation import Goal
from worker.host.diagnosis import FailedStart
from worker.host.pool import Pool
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.messages import LoadModel, Ready, ToController, ToProcess, Warm
from worker.models import ModelSpec

MEMORY = Memory(host=1000)
WARM = Warm(MEMORY, {"import": 2.0})
A = ModelSpec(name="a", path="models/a")
B = ModelSpec(name="b", path="models/b")
PAIR = ModelSpec(name="pair", path="models/pair", tensor_parallel_size=2)


def engine_info(spec: ModelSpec) -> EngineInfo:
    """The engine info of an engine with this model."""
    return EngineInfo(
        "simulated", "7", spec.name, "", 100, 50, max_num_seqs=4, phases_s={"weights": 1.0}
    )


def make_handle(device: int = 0, name: str = "w", **values: Any) -> WorkerProcessHandle:
    """The handle of a process that was not started."""
    settings = {"name": "w", "engine": "simulated", "backoff_s": 1.0, "max_backoff_s": 8.0}
    return WorkerProcessHandle(
        WorkerSettings(redis_url="redis://x", **(settings | values)), name, device
    )


def make_warm(device: int = 0, **values: Any) -> WorkerProcessHandle:
    """The same after the process has become warm."""
    handle = make_handle(device, **values)
    handle.warm(WARM)
    return handle


def make_ready(
    device: int = 0, info: EngineInfo | None = None, **values: Any
) -> WorkerProcessHandle:
    """The same after the process has loaded model `a`."""
    handle = make_warm(device, **values)
    handle.load(A)
    handle.ready(Ready(info or engine_info(A), Memory(host=3000)))
    return handle


class PlayedProcess:
    """A process that does nothing by itself: the test sends its messages and ends it."""

    def __init__(
        self, target: Any, args: tuple[Any, int, int, Connection, Connection], name: str
    ) -> None:
        self.name = name
        self.device = args[1]
        self.pid = 2**31 - 1
        self.exitcode: int | None = None
        # The pool closes its own copy.
        self._pipe = Connection(os.dup(args[3].fileno()))
        self.sentinel, self._life = os.pipe()

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None:
        """Mark the process as killed unless it has ended."""
        self.end(-signal.SIGKILL)

    def end(self, status: int) -> None:
        """End the process unless it has ended."""
        if self.exitcode is None:
            self.exitcode = status
            os.close(self._life)
            self._pipe.close()

    def close(self) -> None:
        """Kill the process, and close its sentinel."""
        self.kill()
        os.close(self.sentinel)

    def say(self, message: ToController) -> None:
        """Send the pool a message."""
        self._pipe.send(message)

    def heard(self) -> list[ToProcess]:
        """The messages to it since the previous call."""
        found = []
        while self._pipe.poll():
            found.append(self._pipe.recv())
        return found


class NotingOwner:
    """An owner of a pool that permits everything and records the calls."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.deaths: list[tuple[str, FailedStart]] = []
        self.goes_on_trying = False

    def changed(self, member: WorkerProcessHandle) -> None: ...

    def serves(self, member: WorkerProcessHandle) -> None:
        self.told.append(("serves", member.name))

    def gives_way(self, member: WorkerProcessHandle) -> None:
        self.told.append(("gives way", member.name, member.state))

    def died(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        self.told.append(("died", member.name, why, reason))

    def start_failed(self, member: WorkerProcessHandle, death: FailedStart) -> None:
        self.deaths.append((member.name, death))

    def failed(self, goal: Goal, reason: str, *, is_lost: bool = False) -> bool:
        self.told.append(("lost" if is_lost else "failed", goal.spec.name, reason))
        return self.goes_on_trying

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        self.told.append(("refused", member.name, reason))

    def heard(self, member: WorkerProcessHandle, message: ToController) -> None:
        self.told.append(("heard", member.name, message))


class Theatre:
    """A pool with played processes and a recording owner."""

    def __init__(self, **values: Any) -> None:
        # Pauses that end only where a test ends them, however slow the machine is
        settings = {"name": "w", "engine": "simulated", "backoff_s": 500.0, "max_backoff_s": 6000.0}
        self.settings = WorkerSettings(redis_url="redis://x", **(settings | values))
        self.owner = NotingOwner()
        self.pool = Pool(self.settings, self.owner)
        self.pool.start()

    def turn(self) -> list[tuple[Any, ...]]:
        """Let the pool act, read messages and act again; the owner's calls since the last turn."""
        for _ in range(2):
            self.pool.wakeup.set()
            self.pool.run_once()
        told, self.owner.told = self.owner.told, []
        return told

    def member(self, name: str) -> WorkerProcessHandle:
        """A process, by name."""
        (found,) = (one for one in self.pool.members if one.name == name)
        return found

    def process(self, name: str) -> PlayedProcess:
        """The played process of a member."""
        process = self.member(name).process
        assert isinstance(process, PlayedProcess)
        return process

    def say(self, name: str, message: ToController) -> list[tuple[Any, ...]]:
        """Send a member's message to the pool; the resulting calls of the owner."""
        self.process(name).say(message)
        return self.turn()

    def heard(self, name: str) -> list[ToProcess]:
        """The messages to it since the previous call."""
        return self.process(name).heard()

    def warm_up(self) -> None:
        """Let all processes become warm."""
        self.turn()
        for member in self.pool.members:
            self.say(member.name, Warm(MEMORY, {"import": 1.0}))

    def aim(self, spec: ModelSpec | None, *devices: int) -> list[tuple[Any, ...]]:
        """Set the goal of devices, and let the pool act; the resulting calls of the owner."""
        self.pool.aim(spec, devices)
        return self.turn()

    def hold(self, spec: ModelSpec, *devices: int) -> WorkerProcessHandle:
        """Let the first warm process of each device load a model; the leader."""
        self.aim(spec, *devices)
        leader = self.pool.holder(devices[0])
        assert leader
        self.say(leader.name, Ready(engine_info(spec), MEMORY))
        for device in devices:
            holder = self.pool.holder(device)
            assert holder
            assert self.heard(holder.name)[-1].__class__ is LoadModel
        assert leader.state is State.READY
        return leader


class PlayedServer:
    """Starts processes that the test plays."""

    Pipe = staticmethod(multiprocessing.Pipe)
    ForkedProcess = PlayedProcess


def play_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pools start processes that the test plays."""
    monkeypatch.setattr(worker.host.process_handle, "fork_server", PlayedServer)
    monkeypatch.setattr("worker.host.pool.preload", lambda modules: None)


@contextmanager
def theatre(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Iterator[Theatre]:
    """A started pool, which is stopped after the test."""
    play_processes(monkeypatch)
    monkeypatch.setattr("random.random", lambda: 1.0)  # pauses without jitter
    played = Theatre(**values)
    try:
        yield played
    finally:
        played.pool.stop()
