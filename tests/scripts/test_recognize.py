"""recognize.lua: a failover that may have lost writes revokes every lease."""

from __future__ import annotations

import pytest

from tests.support.builders import worker_json
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.protocol.wire import pack_tokens
from tokenyard.scripts.answers import Published


def recognize(yard: PlayedYard, server: str, *, was_replica: bool = False) -> int:
    return yard.scripts.recognize(yard.token, server, was_replica=was_replica)


@pytest.mark.parametrize(
    ("known", "server", "was_replica"),
    [
        pytest.param([], "first", True, id="the first"),
        pytest.param(["first"], "first", True, id="the same"),
        pytest.param(["first"], "second", False, id="restarted"),
    ],
)
def test_a_server_that_lost_nothing_fences_no_worker(
    yard: PlayedYard, worker: str, known: list[str], server: str, was_replica: bool
) -> None:
    for one in known:
        recognize(yard, one)

    assert recognize(yard, server, was_replica=was_replica) == 0
    assert yard.scripts.renew(LONG_MS, [(worker, worker_json())]) == [True]


def test_a_promoted_replica_revokes_every_lease(yard: PlayedYard) -> None:
    # Given two workers, a departed one, and a running request
    workers = [yard.worker(), yard.worker("v")]
    gone = yard.worker("gone")
    held = yard.assign(gone)
    yard.scripts.retire(gone, "crashed", "signal 11")
    running = yard.assign(workers[0])
    assert yard.emit(workers[0], running, [1]) is Published.PUBLISHED
    recognize(yard, "first")

    # If the server is a promoted replica, I expect both to be fenced, and an event for the leader,
    assert recognize(yard, "second", was_replica=True) == 2
    assert yard.events()[-1][b"event"] == b"gone"
    assert yard.emit(workers[0], running, [2], seq=1) is Published.LEASE_LOST
    renewed = yard.scripts.renew(LONG_MS, [(worker, worker_json()) for worker in workers])
    assert renewed == [False] * 2
    # their requests to return with their published tokens and no counted crash,
    assert yard.rescue(workers[0]) == 0
    ((_, fields),) = yard.intake("retry")
    assert fields[b"published"] == pack_tokens([1])
    assert fields.get(b"crashes", b"0") == b"0"
    assert "a replica took the place" in yard.ledger(running.request)["r1"]
    # and the departed one's reason to stay.
    assert yard.rescue(gone) == 0
    assert yard.ledger(held.request)["suspected"] == "1"


@pytest.mark.parametrize(("replaces", "fenced"), [("old", 1), ("", 1), ("another", 0)])
def test_what_a_server_has_replaced_may_be_named(
    yard: PlayedYard, replaces: str, fenced: int
) -> None:
    """So that a slot of a Cluster may move to a node that has replaced another one once."""
    yard.worker()
    yard.scripts.recognize(yard.token, "first", was_replica=False, replication="older")
    yard.scripts.recognize(yard.token, "first", was_replica=False, replication="old")

    names = {"replication": "new", "replaces": replaces}
    assert yard.scripts.recognize(yard.token, "second", was_replica=True, **names) == fenced


def test_no_incarnation_is_repeated_after_a_promotion(yard: PlayedYard) -> None:
    before = yard.worker()
    recognize(yard, "first")
    recognize(yard, "second", was_replica=True)

    assert int(yard.worker().rpartition(".")[2]) > int(before.rpartition(".")[2]) + 1000


def test_a_promotion_is_handled_once(yard: PlayedYard) -> None:
    yard.worker()
    recognize(yard, "first")
    recognize(yard, "second", was_replica=True)
    yard.worker()

    assert recognize(yard, "second", was_replica=True) == 0
