"""rescue.lua: a lost worker's requests return to the intake, and its late writes fail."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.protocol.wire import Assignment, pack_tokens
from tokenyard.scripts.answers import Published
from tokenyard.scripts.leader import RESCUE_HELD


def held(assignment: Assignment) -> tuple[str, str, str]:
    return assignment.entry, assignment.request.client, assignment.request.id


def test_entries_return_with_their_published_tokens(yard: PlayedYard, worker: str) -> None:
    quiet, streaming = yard.assign(worker), yard.assign(worker, make_request(stream=True))
    yard.emit(worker, streaming, [0, 7])
    yard.expire(worker)

    assert yard.rescue(worker) == 0

    back = dict(yard.intake("retry"))
    for assignment, published in ((quiet, None), (streaming, pack_tokens([0, 7]))):
        ledger = yard.ledger(assignment.request)
        assert (ledger["state"], ledger["intake"]) == ("waiting", "retry")
        assert (ledger["sid"], ledger["crashes"]) == (assignment.sid, "1")
        assert "worker" not in ledger
        assert back[ledger["entry"]].get(b"published") == published
    assert not yard.connection.exists(yard.keys.lane(worker))
    assert yard.connection.zscore(yard.keys.leases, worker) is None
    assert yard.connection.hget(yard.keys.workers, worker) is None


def test_running_lease_protects_a_lane(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    assert yard.scripts.rescue(yard.token, worker, [held(assignment)]) == RESCUE_HELD
    assert yard.lane(worker) == [assignment]


def test_first_call_only_ends_the_lease(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    yard.expire(worker)

    assert yard.scripts.rescue(yard.token, worker) == 1

    assert yard.lane(worker) == [assignment]
    assert yard.finish(worker, assignment) is Published.LEASE_LOST


def test_idle_worker_is_forgotten_by_the_first_call(yard: PlayedYard, worker: str) -> None:
    yard.expire(worker)

    assert yard.scripts.rescue(yard.token, worker) == 0
    assert yard.connection.zcard(yard.keys.leases) == 0


def test_lane_is_emptied_a_batch_at_a_time(yard: PlayedYard, worker: str) -> None:
    lane = [yard.assign(worker) for _ in range(5)]
    yard.expire(worker)

    left = [yard.scripts.rescue(yard.token, worker, [held(item)]) for item in lane]

    assert left == [4, 3, 2, 1, 0]
    assert len(yard.intake("retry")) == 5


def test_batch_repeated_after_a_lost_answer_changes_nothing(yard: PlayedYard, worker: str) -> None:
    lane = [yard.assign(worker) for _ in range(2)]
    yard.expire(worker)
    yard.scripts.rescue(yard.token, worker, [held(lane[0])])

    assert yard.scripts.rescue(yard.token, worker, [held(lane[0])]) == 1
    assert yard.scripts.rescue(yard.token, worker, [held(lane[1]), held(lane[1])]) == 0
    assert yard.scripts.rescue(yard.token, worker, [held(item) for item in lane]) == 0
    assert len(yard.intake("retry")) == 2
    assert yard.ledger(lane[0].request)["crashes"] == "1"


def test_request_that_loses_three_workers_keeps_its_tokens_and_epoch(
    yard: PlayedYard, worker: str
) -> None:
    request = make_request(stream=True)
    assignment = yard.assign(worker, request)
    sid = assignment.sid
    for seq in range(3):
        yard.emit(worker, assignment, [seq], seq=seq, epoch=4 + seq)
        yard.lose(worker)
        worker = yard.worker()
        assignment = yard.place(yard.waiting(request), worker)

    assert (assignment.sid, assignment.attempt, assignment.crashes) == (sid, 4, 3)
    assert (assignment.published, assignment.first_epoch) == (pack_tokens([0, 1, 2]), 4)
    assert assignment.request == request
    lane = yard.keys.lane(worker)
    ((_, fields),) = yard.connection.xrange(lane)
    values = yard.connection.eval("return #redis.call('XRANGE', KEYS[1], '-', '+')[1][2]", 1, lane)
    assert values == 2 * len(fields), "a field stands there twice"


@pytest.mark.parametrize("how", ["rescue", "hand_back"])
def test_a_retry_has_the_model_of_its_last_worker(yard: PlayedYard, worker: str, how: str) -> None:
    assignment = yard.assign(worker)
    if how == "rescue":
        yard.expire(worker)
        yard.scripts.rescue(yard.token, worker, [held(assignment)], base_model="adder")
    else:
        yard.scripts.hand_back(worker, assignment, 0, "no memory", base_model="adder")

    ((_, fields),) = yard.intake("retry")
    assert fields[b"base_model"] == b"adder"
    # It is for the leader: the next worker has its own.
    second = yard.worker("second")
    yard.place(yard.waiting(assignment.request), second)
    ((_, fields),) = yard.connection.xrange(yard.keys.lane(second))
    assert b"base_model" not in fields


def test_finished_request_is_not_run_again(yard: PlayedYard, worker: str) -> None:
    done, open_ = yard.assign(worker), yard.assign(worker)
    yard.finish(worker, done)
    yard.expire(worker)

    assert yard.scripts.rescue(yard.token, worker, [held(done), held(open_)]) == 0
    assert yard.ledger(done.request)["state"] == "completed"
    assert len(yard.intake("retry")) == 1


def test_a_lane_entry_that_is_no_assignment_is_dropped(yard: PlayedYard, worker: str) -> None:
    strange = yard.connection.xadd(yard.keys.lane(worker), {"x": "y"}).decode()
    yard.expire(worker)

    assert yard.scripts.rescue(yard.token, worker, [(strange, "anon", "")]) == 0
    assert yard.intake("retry") == []


def test_copy_of_an_assignment_is_dropped_and_the_assignment_stays(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    ((_, fields),) = yard.connection.xrange(lane := yard.keys.lane(worker))
    copy = yard.connection.xadd(lane, fields).decode()
    yard.expire(worker)
    _, client, request_id = held(assignment)

    assert yard.scripts.rescue(yard.token, worker, [(copy, client, request_id)]) == 1
    assert yard.ledger(assignment.request)["state"] == "assigned"
    assert yard.rescue(worker) == 0
    assert len(yard.intake("retry")) == 1


def test_unknown_worker_with_a_lane_is_rescued_as_lost(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    yard.connection.zrem(yard.keys.leases, worker)

    assert yard.rescue(worker) == 0
    assert yard.ledger(assignment.request)["crashes"] == "1"
