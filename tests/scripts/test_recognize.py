"""recognize.lua: after a failover that may have lost writes everybody begins again."""

from __future__ import annotations

import pytest

from tests.support.builders import make_delta, worker_json
from tests.support.yard import LONG_MS, Yard
from tokenyard.protocol.wire import pack_tokens
from tokenyard.scripts import Publication, Published, Renewed

NOT_LEADER = -1


def recognize(yard: Yard, server: str, *, was_replica: bool = False) -> int:
    return yard.scripts.recognize(yard.token, server, was_replica=was_replica)


def test_the_first_server_is_taken_as_it_is(yard: Yard) -> None:
    worker = yard.worker()

    assert recognize(yard, "first", was_replica=True) == 0
    assert yard.scripts.renew(LONG_MS, [(worker, worker_json())]) == [Renewed.HELD]


@pytest.mark.parametrize(("server", "was_replica"), [("first", True), ("second", False)])
def test_the_same_and_one_that_was_only_restarted_fence_nobody(
    yard: Yard, server: str, was_replica: bool
) -> None:
    worker = yard.worker()
    recognize(yard, "first")

    assert recognize(yard, server, was_replica=was_replica) == 0
    assert yard.scripts.renew(LONG_MS, [(worker, worker_json())]) == [Renewed.HELD]


def test_a_promoted_replica_takes_every_lease(yard: Yard) -> None:
    # Given two workers, one that has left, and a request that one of them runs
    workers = [yard.worker(), yard.worker("v")]
    gone = yard.worker("gone")
    held = yard.assign(gone)
    yard.scripts.retire(gone, "crashed", "signal 11")
    running = yard.assign(workers[0])
    delta = Publication(running, make_delta(running.request.id, 0, [1]))
    assert yard.scripts.emit(workers[0], [delta]) == [Published.PUBLISHED]
    recognize(yard, "first")

    # If the server is a replica that was promoted, I expect both to be fenced, and the leader told,
    assert recognize(yard, "second", was_replica=True) == 2
    assert yard.events()[-1][b"event"] == b"gone"
    later = Publication(running, make_delta(running.request.id, 1, [2]))
    assert yard.scripts.emit(workers[0], [later]) == [Published.LEASE_LOST]
    renewed = yard.scripts.renew(LONG_MS, [(worker, worker_json()) for worker in workers])
    assert renewed == [Renewed.LOST] * 2
    # their requests to go back with what was published, at no cost,
    assert yard.rescue(workers[0]) == 0
    ((_, fields),) = yard.intake("retry")
    assert fields[b"published"] == pack_tokens([1])
    assert fields.get(b"crashes", b"0") == b"0"
    assert "a replica took the place" in yard.ledger(running.request)["r1"]
    # and who had gone before to have gone as it did.
    assert yard.rescue(gone) == 0
    assert yard.ledger(held.request)["suspected"] == "1"


def test_and_no_incarnation_is_given_out_twice(yard: Yard) -> None:
    before = yard.worker()
    recognize(yard, "first")
    recognize(yard, "second", was_replica=True)

    assert int(yard.worker().rpartition(".")[2]) > int(before.rpartition(".")[2]) + 1000


def test_it_is_done_once(yard: Yard) -> None:
    yard.worker()
    recognize(yard, "first")
    recognize(yard, "second", was_replica=True)
    yard.worker()

    assert recognize(yard, "second", was_replica=True) == 0


def test_a_former_leader_fences_nobody(yard: Yard) -> None:
    worker = yard.worker()
    recognize(yard, "first")
    yard.depose()

    assert recognize(yard, "second", was_replica=True) == NOT_LEADER
    assert yard.scripts.renew(LONG_MS, [(worker, worker_json())]) == [Renewed.HELD]
