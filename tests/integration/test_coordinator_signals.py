"""The coordinator while operators have paused something."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coordinator import roster
from tests.integration.operating import Opened
from tests.support.builders import make_request
from tests.support.lanes import Lanes, requests
from tests.support.waiting import eventually
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import ALL, Order, Signal, model_scope, worker_scope
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import to_result
from tokenyard.scripts.answers import Cancelled


class Yard(Lanes):
    """A yard with operators; its workers obey when the test lets them."""

    def give(self, signal: Signal, scope: str = ALL) -> None:
        Signals(self).give(Order(signal=signal, scope=scope))

    def ask(self, *names: str, model: str = "", **fields: Any) -> list[str]:
        return self.push([make_request(name, model=model, **fields) for name in names])

    def wait_until_read(self, count: int = 1) -> None:
        """Wait until the coordinator has read so many requests and dispatched none."""
        eventually(lambda: self.held() == count)


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> Yard:
    # Effects must come from events, not because the roster is read again.
    monkeypatch.setattr(roster, "REFRESH_S", 3_600.0)
    return opened(Yard)


@pytest.mark.parametrize("scope", [ALL, model_scope("sim"), worker_scope("w")])
@pytest.mark.parametrize("way", [["PAUSE"], ["PAUSE", "SUSPEND"]])
def test_requests_wait_during_a_pause_and_run_immediately_after(
    yard: Yard, scope: str, way: list[Signal]
) -> None:
    # Given a coordinator that knows its one worker
    worker = yard.worker()
    yard.coordinator()
    yard.ask("before")
    yard.wait_for_load(worker, 1)

    # If that is paused,
    for signal in way:
        yard.give(signal, scope)
    yard.ask("r1", "r2")
    yard.wait_until_read(2)
    # I expect new requests to wait,
    assert yard.ids(worker) == ["before"]
    # and to run when the pause is over, by that event alone.
    if "SUSPEND" in way:
        yard.give("RESUME", scope)
        eventually(lambda: yard.held() == 2)
    yard.give("UNPAUSE", scope)
    assert yard.wait_for_load(worker, 3) == ["before", "r1", "r2"]


def test_a_pause_holds_requests_that_arrive_with_it(yard: Yard) -> None:
    # Given a full worker, and more requests
    worker = yard.worker(lane_limit=1)
    yard.coordinator()
    yard.push(requests(2))
    yard.wait_for_load(worker, 1)

    # If a pause comes before there is room
    yard.give("PAUSE")
    yard.finish(worker, *yard.lane(worker))
    yard.ask("later")

    # I expect no more requests on its lane.
    yard.wait_until_read(2)
    assert yard.load(worker) == 0
    yard.give("UNPAUSE")
    assert yard.wait_for_load(worker, 1) == ["r0001"]


@pytest.mark.long
def test_requests_can_be_cancelled_and_expire_during_a_pause(yard: Yard) -> None:
    # Given a paused yard
    worker = yard.worker()
    yard.give("PAUSE")
    yard.coordinator()
    soon_ms = time.time_ns() // 1_000_000 + 4000
    late = make_request("late", deadline_ms=soon_ms)
    wrong = {"id": "wrong", "tokens": "[1]", "params": "?"}
    yard.push([late, make_request("stays")])
    yard.scripts.submit("normal", [make_request("gone")])
    yard.push_raw(wrong)
    yard.wait_until_read(3)

    # I expect deadlines and cancels to work, and bad requests to be answered,
    assert yard.scripts.cancel("anon", "gone", "the test") is Cancelled.CANCELLED
    assert yard.result("late").status == "expired"
    assert yard.result("wrong").status == "failed"
    # and the rest to be served in its order.
    yard.push([make_request("first")], "high")
    eventually(lambda: yard.held("high") == 1)
    yard.give("UNPAUSE")
    assert yard.wait_for_load(worker, 2) == ["first", "stays"]


def test_a_new_leader_keeps_the_pause(yard: Yard) -> None:
    # Given a paused yard whose leader has gone
    worker = yard.worker()
    first = yard.coordinator()
    yard.ask("r0")
    yard.wait_for_load(worker, 1)
    yard.give("PAUSE")
    first.stop()
    eventually(lambda: yard.connection.get(yard.keys.leader) is None)

    # If another takes over
    yard.ask("r1")
    yard.coordinator(name="second")

    # I expect the new leader to keep the pause until it ends.
    yard.wait_until_read()
    assert yard.ids(worker) == ["r0"]
    yard.give("UNPAUSE")
    assert yard.wait_for_load(worker, 2) == ["r0", "r1"]


class TestDeterministic:
    def test_a_paused_worker_has_joined_and_keeps_its_turns(self, yard: Yard) -> None:
        # Given three expected workers, one of them paused
        workers = [yard.worker(name) for name in "abc"]
        yard.give("PAUSE", worker_scope("b"))
        yard.coordinator(deterministic=True, expect_workers=3)

        # I expect requests to be dealt to all three, and its first to wait for it,
        yard.push(requests(6))
        yard.wait_for_load(workers[0], 1)
        yard.wait_until_read(5)
        assert [yard.ids(worker) for worker in workers] == [["r0000"], [], []]

        # and the whole to be as if there had been no pause.
        yard.give("UNPAUSE", worker_scope("b"))
        for at, worker in enumerate(workers):
            assert yard.wait_for_load(worker, 2) == [f"r{at:04}", f"r{at + 3:04}"]


class TestPlacement:
    @pytest.mark.parametrize("scope", [ALL, model_scope("adder")])
    def test_a_paused_model_is_not_loaded(self, yard: Yard, scope: str) -> None:
        # Given a warm worker, and a paused model
        yard.host("adder", "subtractor")
        worker = yard.warm()
        yard.give("PAUSE", scope)
        yard.coordinator(max_model_wait_s=0.01)

        # If requests wait for it, longer than any model may
        yard.ask("q1", model="adder")
        yard.wait_until_read()
        yard.ask("q2", model="adder")
        yard.wait_until_read(2)

        # I expect it to be loaded only after the pause, and no request to be refused.
        assert yard.commands() == []
        yard.give("UNPAUSE", scope)
        (command,) = eventually(yard.commands)
        assert (command.worker, command.model) == (worker, "adder")
        assert yard.replies("q1") == []

    def test_requests_for_a_paused_model_are_not_refused(self, yard: Yard) -> None:
        # Given a model that cannot be loaded any more
        now_ms = yard.connection.time()[0] * 1000
        yard.host("adder", fault="no such file", faults=9, faulted_ms=now_ms)
        yard.warm()
        yard.give("PAUSE", model_scope("adder"))
        yard.coordinator(max_model_wait_s=0.01)
        yard.ask("q1", model="adder")
        yard.wait_until_read()
        yard.ask("q2", model="adder")
        yard.wait_until_read(2)
        assert yard.replies("q1") == []

        # I expect the refusal when the pause is over.
        yard.give("UNPAUSE", model_scope("adder"))
        error = to_result(yard.result("q1")).error
        assert error
        assert error.code == Code.MODEL_UNAVAILABLE

    def test_a_paused_worker_is_left_alone(self, yard: Yard) -> None:
        # Given a paused worker with an idle model, and a warm one
        yard.host("adder", "subtractor", devices=2)
        idle, warm = yard.warm("v"), yard.warm("w", device=1)
        yard.show(idle, state="ready", model="adder")
        for name in "vw":
            yard.give("PAUSE", worker_scope(name))
        yard.coordinator(max_model_wait_s=0.01)

        # If requests wait for another model
        yard.ask("q1", model="subtractor")
        yard.wait_until_read()
        yard.ask("q2", model="subtractor")
        yard.wait_until_read(2)
        assert yard.commands() == []

        # I expect the warm one to load it when it may.
        yard.give("UNPAUSE", worker_scope("w"))
        (command,) = eventually(yard.commands)
        assert (command.worker, command.model) == (warm, "subtractor")


def test_a_request_without_a_model_waits_during_a_pause(yard: Yard) -> None:
    """Given a yard whose only model is suspended, asleep and all."""
    worker = yard.worker(state="asleep", run_state="SUSPENDED")
    yard.give("PAUSE")
    yard.give("SUSPEND")
    yard.coordinator()
    yard.ask("r")
    yard.wait_until_read()

    # If it wakes and runs again, I expect the request to go there.
    yard.give("RESUME")
    yard.give("UNPAUSE")
    assert yard.load(worker) == 0
    yard.show(worker, state="ready", model="sim")
    assert yard.wait_for_load(worker, 1) == ["r"]
