"""hand_back.lua: a request after an engine fault waits again with its published tokens."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.protocol.wire import pack_tokens
from tokenyard.scripts.answers import HandedBack


def test_request_waits_again_with_tokens_faults_and_a_pause(yard: PlayedYard, worker: str) -> None:
    request = make_request(stream=True)
    neighbour, assignment = yard.assign(worker), yard.assign(worker, request)
    yard.emit(worker, assignment, [7], epoch=4)
    now_ms = yard.now_ms

    code = yard.scripts.hand_back(worker, assignment, 5000, "no memory")

    assert code is HandedBack.HANDED_BACK
    ((entry, fields),) = yard.intake("retry")
    assert (fields[b"published"], fields[b"epoch"]) == (pack_tokens([7]), b"4")
    assert (fields[b"faults"], fields[b"reason"]) == (b"1", b"no memory")
    assert now_ms + 5000 <= int(fields[b"not_before"]) <= now_ms + 15_000
    assert b"crashes" not in fields
    ledger = yard.ledger(request)
    assert (ledger["state"], ledger["intake"], ledger["entry"]) == ("waiting", "retry", entry)
    assert "worker" not in ledger
    at, record = ledger["r1"].split(" ", 1)
    assert now_ms <= int(at) <= now_ms + 10_000
    assert record == f"{worker} fault no memory"
    assert yard.lane(worker) == [neighbour]
    assert yard.freed()[-1] == {b"event": b"capacity", b"worker": worker.encode(), b"count": b"1"}


def test_next_attempt_has_the_number_of_faults(yard: PlayedYard, worker: str) -> None:
    request = make_request()
    assignment = yard.assign(worker, request)
    for _ in range(3):
        yard.scripts.hand_back(worker, assignment, 0, "no memory")
        assignment = yard.place(yard.waiting(request), worker)

    assert (assignment.attempt, assignment.faults, assignment.crashes) == (4, 3, 0)
    assert assignment.request == request
    ((_, fields),) = yard.connection.xrange(yard.keys.lane(worker))
    lane = yard.keys.lane(worker)
    values = yard.connection.eval("return #redis.call('XRANGE', KEYS[1], '-', '+')[1][2]", 1, lane)
    assert values == 2 * len(fields), "a field stands there twice"


def test_rescue_after_a_crash_ignores_the_pause_of_a_fault(yard: PlayedYard, worker: str) -> None:
    request = make_request()
    yard.scripts.hand_back(worker, yard.assign(worker, request), 60_000, "no memory")
    yard.place(yard.waiting(request), worker)
    yard.scripts.retire(worker, "lost", "signal 9")
    yard.rescue(worker)

    ((_, fields),) = yard.intake("retry")

    assert b"not_before" not in fields
    assert (fields[b"faults"], fields[b"crashes"], fields[b"reason"]) == (b"1", b"1", b"signal 9")


@pytest.mark.parametrize(
    "how", ["twice", "finished", "cancelled", "elsewhere", "again here", "not on the lane"]
)
def test_request_of_another_worker_is_unchanged(yard: PlayedYard, worker: str, how: str) -> None:
    request = make_request()
    assignment = yard.assign(worker, request)
    match how:
        case "twice":
            yard.scripts.hand_back(worker, assignment, 0, "x")
        case "finished":
            yard.finish(worker, assignment)
        case "cancelled":
            yard.scripts.cancel(request.client, request.id, "x")
        case "elsewhere":
            yard.scripts.hand_back(worker, assignment, 0, "x")
            yard.place(yard.waiting(request), yard.worker())
        case "again here":
            yard.scripts.hand_back(worker, assignment, 0, "x")
            yard.place(yard.waiting(request), worker)
        case _:
            yard.connection.xdel(yard.keys.lane(worker), assignment.entry)
    before = yard.ledger(request), yard.intake("retry"), yard.lane(worker)

    assert yard.scripts.hand_back(worker, assignment, 0, "x") is HandedBack.STALE
    assert (yard.ledger(request), yard.intake("retry"), yard.lane(worker)) == before
