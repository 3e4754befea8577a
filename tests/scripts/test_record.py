"""record.lua and stand_by.lua: the history of a yard, and the coordinators that stand by."""

from __future__ import annotations

import redis

from tests.support.builders import make_request
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.leader_reports import HistorySample, history_fields
from tokenyard.scripts import Scripts
from tokenyard.yard.history import read_history
from tokenyard.yard.snapshot import LeaderView, read_standbys

SAMPLE = HistorySample(
    at_ms=0, waiting={}, epoch=3, running=2, seconds=10.0, finished=7, tokens=90, ttft=[0, 4]
)


def test_an_entry_has_what_it_was_given_and_what_waits(yard: PlayedYard) -> None:
    # Given requests of two classes, one of them of a tenant
    yard.submit(make_request(), "high")
    yard.submit(make_request(), "low")
    yard.submit(make_request(tenant="ann"), "low")

    # If the leader records a sample
    yard.scripts.record(yard.token, history_fields(SAMPLE), 400)

    # I expect it to be read as it was, with what waits
    [found] = read_history(yard, yard.now_ms)
    assert found.waiting == {"retry": 0, "high": 1, "normal": 0, "low": 2}
    assert found.of_tenants == 1
    assert (found.epoch, found.running, found.finished, found.tokens) == (3, 2, 7, 90)
    assert (found.seconds, found.ttft, found.wait) == (10.0, [0, 4], ())
    assert abs(found.at_ms - yard.now_ms) < 60_000


def test_counters_that_are_garbage_count_as_nothing(yard: PlayedYard) -> None:
    bad = {"tenants_waiting": "-5", "tenants_waiting:high": "inf", "tenants_waiting:low": "1e3"}
    yard.connection.hset(yard.keys.tally, mapping=bad)

    yard.scripts.record(yard.token, history_fields(SAMPLE), 400)
    [found] = read_history(yard, yard.now_ms)
    assert found.of_tenants == 0
    assert set(found.waiting.values()) == {0}


def test_an_entry_is_recorded_without_memory(yard: PlayedYard) -> None:
    with yard.without_memory():
        yard.scripts.record(yard.token, history_fields(SAMPLE), 400)


def test_a_standby_is_shown_for_a_time_or_until_it_goes(
    scripts: Scripts, connection: redis.Redis, keys: Keys
) -> None:
    def standing_by(leader: str = "") -> list[str]:
        seconds, micros = connection.time()
        view = LeaderView(leader, 1, 1) if leader else None
        return read_standbys(Yard(connection, keys), view, seconds * 1000 + micros // 1000)

    scripts.stand_by("ann", 60_000)
    scripts.stand_by("bob", 60_000)
    scripts.stand_by("cid", 50)
    assert set(standing_by()) >= {"ann", "bob"}
    # Whoever leads meanwhile stands by no more.
    assert standing_by("ann")[0] == "bob"

    eventually(lambda: standing_by() == ["ann", "bob"])
    scripts.stand_by("bob", 0)
    assert standing_by() == ["ann"]
    assert connection.zcard(keys.standbys) == 1, "those whose time is over are gone"
