"""retire.lua and rescue.lua: the history that a worker's end adds to its requests."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.protocol.wire import Assignment, pack_tokens

HISTORY = (b"crashes", b"suspected", b"crashed_alone", b"lost_alone")


def counts(fields: dict[bytes, bytes]) -> tuple[int, ...]:
    return tuple(int(fields.get(name, b"0")) for name in HISTORY)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("why", "expected"),
    [("left", (0, 0, 0, 0)), ("lost", (1, 0, 0, 1)), ("crashed", (1, 1, 1, 0))],
)
def test_departure_is_noted_in_the_retry(
    yard: PlayedYard, worker: str, why, alone: bool, expected
) -> None:
    assignment = yard.assign(worker, alone=alone)
    yard.scripts.retire(worker, why, "signal 11 in the kernel")

    yard.rescue(worker)

    ((_, fields),) = yard.intake("retry")
    assert counts(fields) == (expected if alone else (*expected[:2], 0, 0))
    assert fields.get(b"reason") == (None if why == "left" else b"signal 11 in the kernel")
    ledger = yard.ledger(assignment.request)
    _, _, record = ledger["r1"].partition(" ")
    assert record == f"{worker} {why} signal 11 in the kernel"


def test_expired_lease_is_a_loss_with_that_reason(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    yard.expire(worker)

    yard.rescue(worker)

    ((_, fields),) = yard.intake("retry")
    assert counts(fields) == (1, 0, 0, 0)
    assert fields[b"reason"] == b"its lease ran out"
    assert yard.ledger(assignment.request)["r1"].endswith("lost its lease ran out")


def test_crash_makes_all_running_requests_suspects_and_a_lone_one_guilty(
    yard: PlayedYard, worker: str
) -> None:
    neighbours = [yard.assign(worker) for _ in range(3)]
    yard.scripts.retire(worker, "crashed", "exit status 1")
    yard.rescue(worker)
    assert [counts(fields) for _, fields in yard.intake("retry")] == [(1, 1, 0, 0)] * 3
    guilty, *innocent = (item.request for item in neighbours)
    worker = yard.worker()
    yard.place(yard.waiting(guilty), worker, alone=True)
    yard.scripts.retire(worker, "crashed", "exit status 1")

    yard.rescue(worker)

    entries = {fields[b"id"].decode(): fields for _, fields in yard.intake("retry")}
    assert counts(entries[guilty.id]) == (2, 2, 1, 0)
    assert [counts(entries[item.id]) for item in innocent] == [(1, 1, 0, 0)] * 2


def test_history_adds_up_with_a_record_for_each_attempt(yard: PlayedYard) -> None:
    request = make_request(stream=True)
    waiting = yard.submit(request)
    for at, why in enumerate(("crashed", "left", "lost", "lost", "crashed")):
        worker = yard.worker()
        assignment = yard.place(waiting, worker, alone=at > 0)
        yard.emit(worker, assignment, [at], seq=at)
        yard.scripts.retire(worker, why, f"reason {at}")  # type: ignore[arg-type]
        yard.rescue(worker)
        waiting = yard.waiting(request)

    ((_, fields),) = yard.intake("retry")
    assert counts(fields) == (4, 2, 1, 2)
    assert fields[b"published"] == pack_tokens(range(5))
    assert fields[b"reason"] == b"reason 4"
    ledger = yard.ledger(request)
    for attempt, why in enumerate(("crashed", "left", "lost", "lost", "crashed"), start=1):
        began, placed_on, words = ledger[f"t{attempt}"].split(" ", 2)
        ended, ended_on, end = ledger[f"r{attempt}"].split(" ", 2)
        assert int(began.partition("-")[0]) <= int(ended)
        assert placed_on == ended_on == f"w.{attempt}"
        assert (words, end) == ("the test says so", f"{why} reason {attempt - 1}")


@pytest.mark.parametrize(("why", "score"), [("left", -1), ("lost", 0), ("crashed", -2)])
def test_reason_is_kept_until_the_lane_is_rescued(
    yard: PlayedYard, worker: str, why, score: int
) -> None:
    held = [yard.assign(worker) for _ in range(2)]

    assert yard.scripts.retire(worker, why, "signal 9") == 2

    assert yard.connection.zscore(yard.keys.leases, worker) == score
    assert yard.connection.hget(yard.keys.departed, worker) == b"signal 9"
    assert yard.lane(worker) == held
    assert yard.events()[-1] == {b"event": b"gone", b"worker": worker.encode()}
    first = [(held[0].entry, "anon", held[0].request.id)]
    assert yard.scripts.rescue(yard.token, worker, first) == 1
    assert yard.connection.hget(yard.keys.departed, worker) == b"signal 9"
    assert yard.rescue(worker) == 0
    assert not yard.connection.hexists(yard.keys.departed, worker)


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ("crashed", "left", (1, 1, 0, 0)),
        ("crashed", "lost", (1, 1, 0, 0)),
        ("lost", "left", (1, 0, 0, 0)),
        ("left", "lost", (0, 0, 0, 0)),
    ],
)
def test_first_reason_stays_with_its_message(
    yard: PlayedYard, worker: str, assignment: Assignment, first, then, expected
) -> None:
    yard.scripts.retire(worker, first, "signal 11")
    yard.scripts.retire(worker, then, "thrown out")

    yard.rescue(worker)

    ((_, fields),) = yard.intake("retry")
    assert counts(fields) == expected
    assert yard.ledger(assignment.request)["r1"].endswith(f"{first} signal 11")


@pytest.mark.parametrize("why", ["left", "crashed"])
def test_end_of_an_idle_worker_leaves_no_key_behind(yard: PlayedYard, worker: str, why) -> None:
    assert yard.scripts.retire(worker, why, "signal 11") == 0

    for key in (yard.keys.departed, yard.keys.quarantine, yard.keys.leases, yard.keys.workers):
        assert not yard.connection.exists(key)
    assert yard.events()[-1] == {b"event": b"gone", b"worker": worker.encode()}
