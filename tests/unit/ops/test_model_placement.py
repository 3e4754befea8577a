"""The worker on which a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.snapshots import make_view
from tokenyard.ops.models import place_anywhere, place_at
from tokenyard.protocol.control import Command
from tokenyard.protocol.errors import Refused
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerInfo, WorkerState
from tokenyard.yard.snapshot import WorkerView, YardView


def worker(
    name: str, state: WorkerState, device: int, model: str = "", lane: int = 0, **more: Any
) -> WorkerView:
    info = WorkerInfo(name=name, state=state, model=model, controller="host", device=device, **more)
    return WorkerView(f"{name}.1", state, lane, 1000, info)


def yard(*workers: WorkerView, ranks: int = 1) -> YardView:
    host = HostInfo(name="host", models=[ModelInfo(name="m", ranks=ranks), ModelInfo(name="n")])
    return make_view(workers, hosts=[host])


def load(worker: str, *devices: int) -> Command:
    return Command(verb="load", worker=worker, model="m", devices=list(devices))


FREE = worker("free", "warm", 0)
BUSY = worker("busy", "ready", 1, "n", lane=3)
IDLE = worker("idle", "ready", 2, "n")
SLEEPER = worker("sleeper", "asleep", 3, "m")


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([FREE, BUSY, IDLE, SLEEPER], "sleeper.1"),
        ([BUSY, IDLE, FREE], "free.1"),
        ([BUSY, IDLE], "idle.1"),
        ([IDLE, worker("other", "asleep", 2, "m"), worker("idle-2", "ready", 1, "n")], "idle.1"),
        ([worker("paused", "warm", 0, run_state="PAUSED"), IDLE], "idle.1"),
    ],
)
def test_load_target_displaces_the_least(workers: list[WorkerView], chosen: str) -> None:
    assert place_anywhere(yard(*workers), "m") == load(chosen)


def test_a_group_is_loaded_on_its_devices_of_one_host() -> None:
    follower = worker("follower", "attached", 0)
    leader = worker("leader", "ready", 1, "n", group=["leader", "follower"])
    assert place_anywhere(yard(leader, follower, ranks=2), "m") == load("leader.1", 1, 0)


def test_load_without_a_free_device_fails_with_a_hint() -> None:
    with pytest.raises(Refused, match="name a worker, which"):
        place_anywhere(yard(BUSY), "m")


def test_load_on_a_named_worker_displaces_its_busy_model() -> None:
    assert place_at(yard(BUSY), "m", "busy") == load("busy.1")


@pytest.mark.parametrize(
    ("model", "one", "reason"),
    [
        ("m", worker("w", "ready", 0, run_state="PAUSED"), "w is PAUSED: unpause it first"),
        ("m", worker("w", "asleep", 0, run_state="SUSPENDED"), "resume and unpause it first"),
        ("k", worker("w", "warm", 0), "no live host may load 'k'"),
        ("m", worker("other", "warm", 0), "'w' is not live now"),
    ],
)
def test_a_load_on_an_unusable_worker_is_refused_with_the_reason(
    model: str, one: WorkerView, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        place_at(yard(one), model, "w")


def test_a_load_on_a_wrong_host_names_the_hosts_of_the_model() -> None:
    stranger = WorkerInfo(name="w", state="warm", controller="elsewhere")
    with pytest.raises(Refused, match="these may: host"):
        place_at(yard(WorkerView("w.1", "warm", 0, 1000, stranger)), "m", "w")
