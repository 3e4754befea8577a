"""The placement leaves paused workers and models alone."""

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
@pytest.mark.parametrize(
    ("paused", "others", "expected"),
    [
        pytest.param(worker("w.1"), [], "", id="it gets no command"),
        pytest.param(worker("w.1"), [worker("v.1", device=1)], "v.1", id="another gets it"),
        pytest.param(worker("w.1"), [worker("s.1")], "s.1", id="a spare of its device gets it"),
        pytest.param(worker("w.1", "b"), [worker("s.1")], "", id="its model keeps its device"),
        pytest.param(
            worker("v.1", state="attached", device=1),
            [worker("w.1", "b", group=["w", "v"])],
            "",
            id="its group keeps its devices",
        ),
        pytest.param(
            worker("w.1", "a", state="asleep"),
            [worker("v.1", "b", load=1), worker("u.1", device=1)],
            "u.1",
            id="it is not woken",
        ),
        pytest.param(
            worker("w.1", "a"), [worker("v.1", device=1)], "v.1", id="its model is loaded elsewhere"
        ),
    ],
)
def test_a_paused_worker_is_left_alone(
    paused: Worker, others: list[Worker], expected: str, run_state: RunState
) -> None:
    """However long requests for another model, or for its own, have waited."""
    placement = decide([demand("a", wait_s=10 * WAIT_S)], [stopped(paused, run_state), *others])

    assert loads(placement) == ([(expected, "a")] if expected else [])


@both
def test_the_device_of_a_suspended_worker_is_not_given_away(run_state: RunState) -> None:
    """It has let go of its device for something else, and will want it back."""
    workers = [stopped(worker("w.1", "a", state="asleep"), run_state), worker("spare.1")]

    expected = [] if run_state == "SUSPENDED" else [("spare.1", "b")]
    assert loads(decide([demand("b", wait_s=10 * WAIT_S)], workers)) == expected


@both
def test_a_model_of_paused_workers_is_not_hopeless(run_state: RunState) -> None:
    """It is available as soon as an operator resumes it."""
    hosts = host(a={"fault": "no such file", "faults": 9, "faulted_ms": int(NOW_MS)})
    workers = [stopped(worker("w.1", "a"), run_state)]

    assert decide([demand("a", wait_s=10 * WAIT_S)], workers, hosts).hopeless == {}
    assert decide([demand("a", wait_s=10 * WAIT_S)], [], hosts).hopeless


@both
def test_a_pending_load_ends_though_its_worker_was_paused(run_state: RunState) -> None:
    # Given a pending load
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
