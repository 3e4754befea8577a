"""The leader deletes usage that is older than it is kept, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import coordinator.recovery.usage_pruner
from coordinator.recovery.usage_pruner import UsagePruner
from tests.support.lanes import Lanes
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard import clock
from tokenyard.clock import BrokerTime
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.tenants import KEPT_DAYS, day_before
from tokenyard.protocol.yard import Yard


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is ten fields, and the next one is due immediately."""
    monkeypatch.setattr(coordinator.recovery.usage_pruner, "MOST_READ", 10)
    monkeypatch.setattr(coordinator.recovery.usage_pruner, "EVERY_S", 0.0)


def use(connection: redis.Redis, keys: Keys, tenant: str, models: int = 1) -> None:
    """What a tenant used on the last day that is kept, and on the two before it."""
    days = [day_before(time.time(), KEPT_DAYS - 1 + back) for back in range(3)]
    fields = {f"{day} m{at} requests": 1 for day in days for at in range(models)}
    connection.hset(keys.usage(tenant), mapping=fields)  # type: ignore[arg-type]
    connection.zadd(keys.service, {tenant: 1})


def days_of(connection: redis.Redis, keys: Keys, tenant: str) -> set[int]:
    """How many days ago each of the days is that are left."""
    left: Any = connection.hkeys(keys.usage(tenant))
    back = {day_before(time.time(), one).encode(): one for one in range(2 * KEPT_DAYS)}
    return {back[name.partition(b" ")[0]] for name in left}


def run_lap(pruner: UsagePruner, token: str) -> None:
    """Until it rests: how many turns that takes depends on the other keys of the server."""
    pruner.run_once(token)
    while pruner._due <= clock.monotonic():
        pruner.run_once(token)


@pytest.mark.long
def test_a_leader_keeps_the_last_days(broker: Server) -> None:
    lanes = Lanes(broker.url)
    try:
        for tenant in ("ann", "bob"):
            use(lanes.connection, lanes.keys, tenant)
        lanes.coordinator(block_ms=20)
        for tenant in ("ann", "bob"):
            eventually(
                lambda name=tenant: days_of(lanes.connection, lanes.keys, name) == {KEPT_DAYS - 1}
            )
    finally:
        lanes.close()


class TestPieces:
    @pytest.fixture
    def pruner(self, connection: redis.Redis, keys: Keys) -> Iterator[UsagePruner]:
        return UsagePruner(Yard(connection, keys), BrokerTime())

    def test_a_turn_reads_a_bounded_part(
        self, connection: redis.Redis, keys: Keys, pruner: UsagePruner
    ) -> None:
        # Given more fields than a piece, in a hash that is not stored as a list
        use(connection, keys, "ann", models=300)
        turns = 0
        while days_of(connection, keys, "ann") != {KEPT_DAYS - 1}:
            pruner.run_once("1:c")
            turns += 1
        # I expect all that is old to be gone after many turns, and nothing else.
        assert turns > 30
        assert connection.hlen(keys.usage("ann")) == 300

    def test_what_is_no_usage_is_left_alone(
        self, connection: redis.Redis, keys: Keys, pruner: UsagePruner
    ) -> None:
        # Given a key that is no hash, and fields that no script has written
        connection.set(keys.usage("odd"), "x")
        connection.hset(keys.usage("ann"), mapping={"x": 1, "2020 m in": 1, "\x1b m out": 1})
        use(connection, keys, "bob")
        run_lap(pruner, "1:c")
        assert connection.get(keys.usage("odd")) == b"x"
        assert connection.hlen(keys.usage("ann")) == 3
        assert days_of(connection, keys, "bob") == {KEPT_DAYS - 1}

    def test_it_rests_behind_a_lap_and_begins_again_in_the_next_term(
        self, connection: redis.Redis, keys: Keys, pruner: UsagePruner
    ) -> None:
        # Given a leader that found a yard without tenants
        pruner.run_once("1:c")
        use(connection, keys, "ann")
        for _ in range(1_000):
            pruner.run_once("1:c")
        assert len(days_of(connection, keys, "ann")) == 3
        run_lap(pruner, "2:c")
        assert days_of(connection, keys, "ann") == {KEPT_DAYS - 1}
