"""The roster entry of a process in each state of its life."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from typing import get_args

import pytest

from tests.support.pools import A, engine_info, make_ready, make_warm
from tokenyard.protocol.worker_info import WorkerInfo, WorkerState, WorkerTotals
from worker.engines import Memory
from worker.host.membership import lane_limit, roster_entry
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.messages import Heartbeat, Warm

FACTS = {"revision": "r1", "tokenizer": "/models/adder", "phases_s": {"weights": 1.23456}}
ENGINE = replace(engine_info(A), adapters=("lora",), **FACTS)


def entry(member: WorkerProcessHandle) -> WorkerInfo:
    return roster_entry(member, "host", [], 17)


def test_a_ready_process_shows_the_facts_of_its_engine() -> None:
    member = make_ready(3, ENGINE)
    info = entry(member)

    assert (info.name, info.state, info.device, info.controller) == ("w", "ready", 3, "host")
    assert (info.model, info.revision, info.adapters) == ("a", "r1", ["lora"])
    assert (info.engine, info.engine_version) == ("simulated", "7")
    assert (info.max_model_len, info.vocab_size, info.tokenizer) == (100, 50, "/models/adder")
    assert (info.max_num_seqs, info.lane_limit) == (4, 5)
    assert info.phases_s == {"weights": 1.2346}
    assert (info.memory_bytes, info.warm_bytes) == (3000, 1000)
    assert info.host == socket.gethostname()
    assert abs(info.since_ms / 1000 - time.time()) < 60
    assert info.since_ms == int(member.since * 1000)
    assert info.swapped_ms == 17


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
    member = make_ready()
    member.state = state

    assert entry(member).state == shown
    assert shown in get_args(WorkerState)


def test_the_entry_shows_counts_and_the_last_error() -> None:
    member = make_ready()
    member.note_heartbeat(Heartbeat(1, 0, WorkerTotals(finished=2, tokens=9), "q7: no memory"))
    member.drain()

    info = entry(member)
    assert (info.tally, info.last_error) == (WorkerTotals(finished=2, tokens=9), "q7: no memory")
    assert abs(info.last_error_ms / 1000 - time.time()) < 60

    # With another model the count starts again, and the last error stays
    member.warm(Warm(Memory(host=1000), {}))
    assert (entry(member).tally, entry(member).last_error) == (WorkerTotals(), "q7: no memory")


def test_a_slot_without_a_process_belongs_to_its_controller() -> None:
    assert entry(make_warm()).pid == os.getpid()


@pytest.mark.parametrize(("max_num_seqs", "limit"), [(1, 2), (3, 4), (8, 10), (256, 320)])
def test_a_lane_holds_a_quarter_more_than_runs(max_num_seqs: int, limit: int) -> None:
    assert lane_limit(max_num_seqs) == limit
