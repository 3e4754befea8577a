"""The roster entry of a process in each state of its life."""

from __future__ import annotations

import os
import socket
import time
from typing import get_args

import pytest

from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import WorkerInfo, WorkerState, WorkerTotals
from worker.engines import EngineInfo, Memory
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.host.roster_entry import lane_limit, roster_entry
from worker.messages import Heartbeat, Ready, Warm
from worker.models import ModelSpec

ADDER = ModelSpec(name="adder", path="models/adder")
ENGINE = EngineInfo(
    "simulated",
    "7",
    "adder",
    "r1",
    max_model_len=100,
    vocab_size=50,
    slots=4,
    tokenizer="/models/adder",
    adapters=("lora",),
    phases_s={"weights": 1.23456},
)


def warm(device: int = 0) -> WorkerProcessHandle:
    made = WorkerProcessHandle(
        WorkerSettings(redis_url="redis://x", engine="simulated"), "w-1", device
    )
    made.warm(Warm(Memory(host=1000), {"import": 2.0}))
    return made


def ready(device: int = 0) -> WorkerProcessHandle:
    made = warm(device)
    made.load(ADDER)
    made.ready(Ready(ENGINE, Memory(host=3000)))
    return made


def entry(
    member: WorkerProcessHandle, *, group: list[str] | None = None, swapped_ms: int = 0
) -> WorkerInfo:
    return roster_entry(member, "host", group or [], swapped_ms)


def test_a_ready_process_shows_the_facts_of_its_engine() -> None:
    info = entry(ready(3))

    assert (info.name, info.state, info.device, info.controller) == ("w-1", "ready", 3, "host")
    assert (info.model, info.revision, info.adapters) == ("adder", "r1", ["lora"])
    assert (info.engine, info.engine_version) == ("simulated", "7")
    assert (info.max_model_len, info.vocab_size, info.tokenizer) == (100, 50, "/models/adder")
    assert (info.slots, info.lane_limit) == (4, 5)
    assert info.phases_s == {"weights": 1.2346}
    assert (info.memory_bytes, info.warm_bytes) == (3000, 1000)
    assert info.host == socket.gethostname()


def test_a_warm_process_has_no_model() -> None:
    info = entry(warm())

    assert (info.state, info.model, info.engine, info.phases_s) == ("warm", "", "", {"import": 2.0})
    assert (info.slots, info.lane_limit) == (1, 2)


def test_a_loading_process_shows_the_model() -> None:
    member = warm()
    member.load(ADDER)

    assert (entry(member).state, entry(member).model) == ("loading", "adder")


def test_the_entry_shows_the_times_of_its_state_and_its_last_swap() -> None:
    member = ready()

    info = entry(member, swapped_ms=17)

    assert abs(info.since_ms / 1000 - time.time()) < 60
    assert info.since_ms == int(member.since * 1000)
    assert info.swapped_ms == 17


def test_a_group_entry_names_its_workers() -> None:
    assert entry(ready(), group=["w-1", "w-2"]).group == ["w-1", "w-2"]


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (State.WARMING, "warming"),
        (State.WARM, "warm"),
        (State.LOADING, "loading"),
        (State.READY, "ready"),
        (State.DRAINING, "draining"),
        (State.DRAINED, "draining"),
        (State.ASLEEP, "asleep"),
        (State.UNLOADING, "unloading"),
        (State.ATTACHED, "attached"),
        (State.DOWN, "failed"),
    ],
)
def test_each_state_has_its_name(state: State, shown: WorkerState) -> None:
    member = ready()
    member.state = state

    assert entry(member).state == shown
    assert shown in get_args(WorkerState)


def test_the_entry_shows_counts_and_the_last_error() -> None:
    member = ready()
    member.note_heartbeat(Heartbeat(1, 0, WorkerTotals(finished=2, tokens=9), "q7: no memory"))
    member.drain()

    info = entry(member)
    assert (info.tally, info.last_error) == (WorkerTotals(finished=2, tokens=9), "q7: no memory")
    assert abs(info.last_error_ms / 1000 - time.time()) < 60

    # With another model the count starts again, and the last error stays
    member.warm(Warm(Memory(host=1000), {}))
    assert (entry(member).tally, entry(member).last_error) == (WorkerTotals(), "q7: no memory")


def test_a_slot_without_a_process_belongs_to_its_controller() -> None:
    assert entry(warm()).pid == os.getpid()


@pytest.mark.parametrize(("slots", "limit"), [(1, 2), (3, 4), (8, 10), (256, 320)])
def test_a_lane_holds_a_quarter_more_than_runs(slots: int, limit: int) -> None:
    assert lane_limit(slots) == limit
