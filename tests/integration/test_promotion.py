"""How the leader notices that its server is another."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis

from coordinator.recovery.failover import FailoverDetector
from tests.support.lanes import LONG_MS, Lanes
from tests.support.servers import Server, limited_user
from tests.support.waiting import eventually
from tokenyard.protocol.keys import Yard
from tokenyard.scripts import Scripts


def became_master(lanes: Lanes, before: str) -> None:
    """As it is where the yard was on another server, whose replica this one was."""
    lanes.connection.hset(lanes.keys.info, "server", before)


@pytest.fixture
def was_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reports that it was a replica before."""
    original = FailoverDetector._info

    def info(self: FailoverDetector) -> Any:
        return {**original(self), "total_net_repl_input_bytes": 1}

    monkeypatch.setattr(FailoverDetector, "_info", info)


def test_workers_are_fenced_before_they_get_requests(lanes: Lanes, was_a_replica: None) -> None:
    # Given a worker from before the promotion, and a waiting request
    worker = lanes.worker()
    lanes.push_raw({"id": "r", "tokens": "[1]", "model": "sim"})
    became_master(lanes, "another")

    # If a coordinator takes over, I expect it to give the worker nothing,
    lanes.coordinator()
    eventually(lambda: not lanes.connection.zscore(lanes.keys.leases, worker))
    assert lanes.load(worker) == 0
    # and the next incarnation to be served.
    assert lanes.wait_for_load(lanes.worker(), 1) == ["r"]


def test_a_leader_notices_a_promotion_without_an_error(lanes: Lanes, was_a_replica: None) -> None:
    """Given a connection that was made again unnoticed."""
    worker = lanes.worker()
    token = lanes.scripts.lead("leader", LONG_MS)
    detector = FailoverDetector(lanes.scripts)
    assert detector.check(token) == 0

    became_master(lanes, "another")
    assert detector.check(token) == 0, "the server is the same as before"
    assert FailoverDetector(lanes.scripts).check(token) == 1
    assert lanes.connection.zscore(lanes.keys.leases, worker) == -1


def test_another_server_in_the_same_term_is_noticed(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was read from the one before may be otherwise there."""
    token = lanes.scripts.lead("leader", LONG_MS)
    detector = FailoverDetector(lanes.scripts)
    assert not detector.check(token)

    monkeypatch.setattr(detector, "_info", lambda: {"run_id": "another"})

    assert [detector.check(token) for _ in range(2)] == [True, False]


def test_a_user_without_info_is_warned_once(
    lanes: Lanes, broker: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        limited_user(broker.url, "+@all", "-info") as url,
        redis.Redis.from_url(url) as connection,
        caplog.at_level(logging.WARNING),
    ):
        detector = FailoverDetector(Scripts(Yard(connection, lanes.keys)))
        assert [detector.check("1:leader") for _ in range(3)] == [0, 0, 0]
    assert len(caplog.records) == 1
