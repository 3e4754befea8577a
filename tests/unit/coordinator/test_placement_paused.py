"""The placement leaves alone what operators have paused."""

from __future__ import annotations

import pytest

from coordinator.placement.decide import Placement, Situation, place
from coordinator.placement.devices import Worker
from tests.support.situations import NOW_MS, WAIT_S, decide, demand, host, loads, worker
from tokenyard.protocol.control import RunState

NOT_RUNNING: list[RunState] = ["PAUSED", "SUSPENDED"]
both = pytest.mark.parametrize("run_state", NOT_RUNNING)


def stopped(one: Worker, run_state: RunState) -> Worker:
    return Worker(one.worker, one.info, one.load, one.worked_ms, run_state)


@both
def test_a_paused_warm_worker_gets_no_command(run_state: RunState) -> None:
    # Given a paused warm worker on device 0, and a running one on device 1
    workers = [stopped(worker("w.1"), run_state), worker("v.1", device=1)]

    # I expect the other to load,
    assert loads(decide([demand("a")], workers)) == [("v.1", "a")]
    # and nobody where there is no other.
    assert loads(decide([demand("a", wait_s=2 * WAIT_S)], workers[:1])) == []


@both
def test_a_spare_of_the_same_device_gets_the_command(run_state: RunState) -> None:
    workers = [stopped(worker("w.1"), run_state), worker("spare.1")]

    assert loads(decide([demand("a")], workers)) == [("spare.1", "a")]


@both
def test_a_paused_worker_keeps_its_device(run_state: RunState) -> None:
    # Given a device whose model is idle and paused, and a warm spare there
    workers = [stopped(worker("w.1", "a"), run_state), worker("spare.1")]

    # I expect it not to give way, however long others wait.
    assert loads(decide([demand("b", wait_s=10 * WAIT_S)], workers)) == []


@both
def test_a_group_with_a_paused_member_keeps_its_devices(run_state: RunState) -> None:
    group = {"group": ["w", "v"]}
    workers = [
        worker("w.1", "a", **group),
        stopped(worker("v.1", state="attached", device=1), run_state),
    ]

    assert loads(decide([demand("b", wait_s=10 * WAIT_S)], workers)) == []


@both
def test_a_paused_sleeper_is_not_woken(run_state: RunState) -> None:
    # Given a worker that sleeps with the model beside one that holds another
    workers = [
        stopped(worker("w.1", "a", state="asleep"), run_state),
        worker("v.1", "b"),
        worker("u.1", device=1),
    ]

    # I expect a warm one to load it.
    assert loads(decide([demand("a")], workers)) == [("u.1", "a")]


@both
def test_the_device_of_a_suspended_worker_is_not_given_away(run_state: RunState) -> None:
    """It has let go of its device for something else, and will want it back."""
    workers = [stopped(worker("w.1", "a", state="asleep"), run_state), worker("spare.1")]

    expected = [] if run_state == "SUSPENDED" else [("spare.1", "b")]
    assert loads(decide([demand("b", wait_s=10 * WAIT_S)], workers)) == expected


@both
def test_a_model_of_paused_workers_is_loaded_elsewhere(run_state: RunState) -> None:
    # Given a model whose only worker is paused, and a free device
    workers = [stopped(worker("w.1", "a"), run_state), worker("v.1", device=1)]

    assert loads(decide([demand("a")], workers)) == [("v.1", "a")]


@both
def test_a_model_of_paused_workers_is_not_hopeless(run_state: RunState) -> None:
    """It can be had as soon as somebody lets it run."""
    hosts = host(a={"fault": "no such file", "faults": 9, "faulted_ms": int(NOW_MS)})
    workers = [stopped(worker("w.1", "a"), run_state)]

    assert decide([demand("a", wait_s=10 * WAIT_S)], workers, hosts).hopeless == {}
    assert decide([demand("a", wait_s=10 * WAIT_S)], [], hosts).hopeless


@both
def test_a_pending_load_ends_though_its_worker_was_paused(run_state: RunState) -> None:
    # Given a load that was ordered
    placed = decide([demand("a")], [worker("w.1")])
    assert loads(placed) == [("w.1", "a")]

    # If its worker holds the model by now, and is paused
    workers = [stopped(worker("w.1", "a"), run_state), worker("v.1", device=1)]

    # I expect nothing to be under way any more.
    assert decide([], workers, pending=placed.pending).pending == []


def decide_paused(model: str) -> Placement:
    """On a free device, for one model that is pinned, and another."""
    hosts = host(a={"pin": 1}, b={})
    return place(Situation([], [worker("w.1")], hosts, NOW_MS, WAIT_S, paused={model}))


def test_a_paused_model_is_not_loaded_though_it_is_pinned() -> None:
    assert loads(decide_paused("b")) == [("w.1", "a")]
    assert loads(decide_paused("a")) == []
