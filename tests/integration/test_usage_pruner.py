"""The leader deletes usage that is older than it is kept, piece by piece."""

from __future__ import annotations

import time
from typing import Any

import pytest

import coordinator.recovery.usage_pruner
from coordinator.recovery.usage_pruner import UsagePruner
from tests.support.lanes import Lanes
from tests.support.waiting import eventually
from tokenyard import clock
from tokenyard.clock import BrokerTime
from tokenyard.protocol.tenants import KEPT_DAYS, day_before


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is ten fields, and the next one is due immediately."""
    monkeypatch.setattr(coordinator.recovery.usage_pruner, "MOST_READ", 10)
    monkeypatch.setattr(coordinator.recovery.usage_pruner, "EVERY_S", 0.0)


def use(yard: Lanes, tenant: str, models: int = 1) -> None:
    """What a tenant used on the last day that is kept, and on the two before it."""
    days = [day_before(time.time(), KEPT_DAYS - 1 + back) for back in range(3)]
    fields = {f"{day} m{at} requests": 1 for day in days for at in range(models)}
    yard.connection.hset(yard.keys.usage(tenant), mapping=fields)  # type: ignore[arg-type]
    yard.connection.zadd(yard.keys.service, {tenant: 1})


def days_of(yard: Lanes, tenant: str) -> set[int]:
    """How many days ago each of the days is that are left."""
    left: Any = yard.connection.hkeys(yard.keys.usage(tenant))
    back = {day_before(time.time(), one).encode(): one for one in range(2 * KEPT_DAYS)}
    return {back[name.partition(b" ")[0]] for name in left}


def run_lap(pruner: UsagePruner, token: str) -> None:
    """Until it rests: how many turns that takes depends on the other keys of the server."""
    pruner.run_once(token)
    while pruner._due <= clock.monotonic():
        pruner.run_once(token)


@pytest.mark.long
def test_a_leader_keeps_the_last_days(lanes: Lanes) -> None:
    for tenant in ("ann", "bob"):
        use(lanes, tenant)
    lanes.coordinator(block_ms=20)
    for tenant in ("ann", "bob"):
        eventually(lambda name=tenant: days_of(lanes, name) == {KEPT_DAYS - 1})


class TestPieces:
    @pytest.fixture
    def pruner(self, lanes: Lanes) -> UsagePruner:
        return UsagePruner(lanes, BrokerTime())

    def test_a_turn_reads_a_bounded_part(self, lanes: Lanes, pruner: UsagePruner) -> None:
        # Given more fields than a piece, in a hash that is not stored as a list
        use(lanes, "ann", models=300)
        turns = 0
        while days_of(lanes, "ann") != {KEPT_DAYS - 1}:
            pruner.run_once("1:c")
            turns += 1
        # I expect all that is old to be gone after many turns, and nothing else.
        assert turns > 30
        assert lanes.connection.hlen(lanes.keys.usage("ann")) == 300

    def test_what_is_no_usage_is_left_alone(self, lanes: Lanes, pruner: UsagePruner) -> None:
        # Given a key that is no hash, and fields that no script has written
        odd, ann = (lanes.keys.usage(name) for name in ("odd", "ann"))
        lanes.connection.set(odd, "x")
        lanes.connection.hset(ann, mapping={"x": 1, "2020 m in": 1, "\x1b m out": 1})
        use(lanes, "bob")
        run_lap(pruner, "1:c")
        assert lanes.connection.get(odd) == b"x"
        assert lanes.connection.hlen(ann) == 3
        assert days_of(lanes, "bob") == {KEPT_DAYS - 1}

    def test_it_rests_behind_a_lap_and_begins_again_in_the_next_term(
        self, lanes: Lanes, pruner: UsagePruner
    ) -> None:
        # Given a leader that found a yard without tenants
        pruner.run_once("1:c")
        use(lanes, "ann")
        for _ in range(1_000):
            pruner.run_once("1:c")
        assert len(days_of(lanes, "ann")) == 3
        run_lap(pruner, "2:c")
        assert days_of(lanes, "ann") == {KEPT_DAYS - 1}
