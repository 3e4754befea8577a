"""Unread requests: bounded rounds that miss nothing, and turns that do not spin."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import coordinator.recovery.sweeper
from coordinator.coordinator import Coordinator
from tests.support.builders import make_request
from tests.support.lanes import LONG_MS, Lanes, requests
from tests.support.waiting import eventually
from tokenyard.protocol.replies import to_result
from tokenyard.protocol.wire import Request, pack_tokens
from tokenyard.scripts.answers import Cancelled

IDLE_MS = 1000
MANY_TURNS = 60


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round looks at ten entries of each class and acts on four."""
    monkeypatch.setattr(coordinator.recovery.sweeper, "MOST_READ", 10)
    monkeypatch.setattr(coordinator.recovery.sweeper, "MOST_ACTED_ON", 4)
    monkeypatch.setattr(coordinator.recovery.sweeper, "EVERY_S", 0.05)


def code(lanes: Lanes, request_id: str) -> tuple[str, str]:
    result = to_result(lanes.result(request_id))
    assert result.error is not None
    return result.status, result.error.code


def late(count: int, prefix: str) -> list[Request]:
    return [make_request(f"{prefix}{at:04}", deadline_ms=1_000) for at in range(count)]


@pytest.mark.usefixtures("small_rounds")
class TestRounds:
    def test_late_requests_of_every_class_are_answered(self, lanes: Lanes) -> None:
        # Given more late requests than a round answers, and more entries than it reads
        stay = lanes.push(requests(30, "a"))
        gone = lanes.push(late(15, "b")) + lanes.push(late(15, "c"), "low")
        stay += lanes.push(requests(30, "d")) + lanes.push(requests(5, "e"), "high")
        gone += lanes.push(late(3, "f"))

        lanes.coordinator(block_ms=50)

        for name in gone:
            assert code(lanes, name) == ("expired", "DEADLINE_EXCEEDED")
        assert lanes.waiting() == len(stay)
        worker = lanes.worker()
        assert sorted(lanes.wait_for_load(worker, len(stay))) == sorted(stay)

    @pytest.mark.long
    def test_late_entries_that_are_no_requests_do_not_block_the_sweeper(self, lanes: Lanes) -> None:
        # Given late unanswerable entries, more than a round answers
        worker = lanes.worker(lane_limit=1)
        leading = lanes.coordinator(block_ms=500)
        lanes.push(requests(40))
        lanes.wait_for_load(worker, 1)
        for _ in range(20):
            lanes.push_raw({"prompt": "p", "deadline": 1})
        lanes.push_raw({"id": "bad", "prompt": "p", "deadline": 1, "stream": "maybe"})
        gone = lanes.push(late(3, "b"))
        _push_retry(lanes, "late", deadline=1)

        # I expect the others to be answered, and no round after round for their sake.
        for name in [*gone, "late"]:
            assert code(lanes, name) == ("expired", "DEADLINE_EXCEEDED")
        assert code(lanes, "bad") == ("failed", "INVALID_REQUEST")
        assert idle_turns(leading) < MANY_TURNS

    def test_excess_requests_are_refused_newest_first(self, lanes: Lanes) -> None:
        # Given a yard with room for twenty, ten of which were submitted
        lanes.coordinator(max_num_queued_reqs=20, block_ms=50)
        submitted = requests(10, "s")
        lanes.scripts.submit("normal", submitted)
        early = lanes.push(requests(10, "e"), "low")

        excess = lanes.push(requests(25, "x")) + lanes.push(requests(5, "y"), "high")

        # I expect thirty of the plain ones to be refused, low priorities first.
        eventually(lambda: lanes.waiting() == 20)
        stays = [one.id for one in submitted]
        refused = [name for name in early + excess if lanes.connection.exists(_ledger(lanes, name))]
        assert len(refused) == 30
        assert set(early) <= set(refused)
        assert {code(lanes, name) for name in refused} == {("failed", "QUEUE_FULL")}
        worker = lanes.worker()
        ids = lanes.wait_for_load(worker, 20)
        assert set(stays) <= set(ids)

    def test_requests_of_many_lost_clients_are_cancelled(self, lanes: Lanes) -> None:
        # Given three watched clients with more requests than a round cancels, and one that stays
        lanes.coordinator(block_ms=50)
        for client in ("a", "b", "c", "stays"):
            mine = [make_request(f"{client}{n}", client=client) for n in range(7)]
            lanes.scripts.submit("normal", mine, watched=client)

        lanes.connection.zadd(lanes.keys.clients, {"a": 1, "b": 2, "c": 3})

        for client in ("a", "b", "c"):
            for number in range(7):
                assert lanes.result(f"{client}{number}", client).status == "cancelled"
        eventually(lambda: lanes.connection.zcard(lanes.keys.clients) == 1)
        assert lanes.waiting() == 7
        assert lanes.connection.scard(lanes.keys.attached("stays")) == 7


def test_a_lost_clients_request_that_moves_all_the_time_is_cancelled_later(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.recovery.sweeper, "EVERY_S", 0.0)
    leading = lanes.take_lead()
    lanes.scripts.submit("normal", [make_request("a", client="ann")], watched="ann")
    lanes.connection.zadd(lanes.keys.clients, {"ann": 1})

    with monkeypatch.context() as patch:
        patch.setattr(leading._sweeper._scripts, "cancel", lambda *_: Cancelled.MOVED)
        leading._sweeper.run_once()
    assert lanes.connection.smembers(lanes.keys.attached("ann")) == {b"a"}

    leading._sweeper.run_once()
    assert lanes.result("a", "ann").status == "cancelled"


def _ledger(lanes: Lanes, request_id: str) -> str:
    return lanes.keys.ledger("anon", request_id)


def idle_turns(leading: Coordinator) -> int:
    """How many turns a coordinator makes until those that found nothing asked to wait `IDLE_MS`.

    That sum is the same on any machine, unlike the turns of a second. A loop that does not wait
    never gets there, so that the count ends at `MANY_TURNS`.
    """
    turns, asked_ms, is_over = 0, 0, threading.Event()
    inner: Any = leading._intake.read

    def read(room: int, block_ms: int, **more: Any) -> Any:
        nonlocal turns, asked_ms
        found = inner(room, block_ms, **more)
        if not is_over.is_set():
            turns += 1
            asked_ms += 0 if any(found) else block_ms
            if turns >= MANY_TURNS or asked_ms >= IDLE_MS:
                is_over.set()
        return found

    leading._intake.read = read  # type: ignore[method-assign]  # counts
    assert is_over.wait(30.0)
    leading._intake.read = inner  # type: ignore[method-assign]
    return turns


class TestPatience:
    """A turn that finds nothing to do waits for something to read."""

    def test_a_turn_waits_before_the_expected_workers_have_joined(self, lanes: Lanes) -> None:
        leading = lanes.coordinator(expect_workers=2)
        lanes.worker("a")
        lanes.push(requests(50))

        assert idle_turns(leading) < MANY_TURNS
        lanes.worker("b")
        eventually(lambda: lanes.waiting() == 0)

    @pytest.mark.long
    def test_a_turn_waits_while_all_lanes_are_full(self, lanes: Lanes) -> None:
        worker = lanes.worker(lane_limit=2)
        leading = lanes.coordinator()
        lanes.push(requests(50))
        lanes.wait_for_load(worker, 2)

        assert idle_turns(leading) < MANY_TURNS

    @pytest.mark.long
    def test_a_turn_waits_while_a_suspect_waits_for_an_empty_lane(self, lanes: Lanes) -> None:
        # Given a lane with one request, then a suspect and another request
        worker = lanes.worker()
        leading = lanes.coordinator()
        lanes.push(requests(1))
        lanes.wait_for_load(worker, 1)
        _push_retry(lanes, "suspect", suspected=1, trial=0)
        eventually(lambda: leading._intake.backlog.count("retry"))
        lanes.push(requests(1, "other"))

        assert idle_turns(leading) < MANY_TURNS
        assert lanes.load(worker) == 1

        # If the lane becomes empty, I expect the suspect alone there, immediately, then the other.
        lanes.finish(worker, *lanes.lane(worker))
        eventually(lambda: lanes.ids(worker) == ["suspect"])
        assert idle_turns(leading) < MANY_TURNS
        assert lanes.ids(worker) == ["suspect"]
        lanes.finish(worker, *lanes.lane(worker))
        eventually(lambda: lanes.ids(worker) == ["other0000"])

    @pytest.mark.long
    def test_a_turn_waits_during_back_off(self, lanes: Lanes) -> None:
        worker = lanes.worker()
        leading = lanes.coordinator()
        _push_retry(lanes, "rests", not_before=lanes.now_ms + LONG_MS)
        eventually(lambda: leading._intake.backlog.count("retry"))

        assert idle_turns(leading) < MANY_TURNS
        assert lanes.load(worker) == 0

        # If the back-off of another ends, I expect that one, and not before.
        until_ms = lanes.now_ms + 300
        _push_retry(lanes, "pauses", not_before=until_ms)
        assert lanes.wait_for_load(worker, 1) == ["pauses"]
        (assignment,) = lanes.lane(worker)
        assert int(assignment.entry.partition("-")[0]) >= until_ms


def _push_retry(lanes: Lanes, request_id: str, **history: int) -> None:
    """A waiting retry with its history."""
    fields = {"id": request_id, "tokens": pack_tokens([1, 2]), **history}
    lanes.push_raw(fields, "retry")
