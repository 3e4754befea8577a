"""Counters of what tenants used: they only grow, whatever happens to what they are read from."""

from __future__ import annotations

import pytest
import redis

import coordinator.telemetry.tenant_series
from coordinator.telemetry.tenant_series import WHATS, TenantUsageCounts
from tokenyard.protocol.keys import Keys, Yard

MODELS = ("", "sim")


class UsedYard(Yard):
    """A yard whose day and usage the test sets."""

    def __init__(
        self, connection: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(connection, keys)
        self.counts = TenantUsageCounts()
        self.day = "20261123"
        module = coordinator.telemetry.tenant_series
        monkeypatch.setattr(module, "day_before", lambda *_: self.day)

    def use(self, count: int, what: str = "in", tenant: str = "ann", model: str = "sim") -> None:
        self.connection.hincrby(self.keys.usage(tenant), f"{self.day} {model} {what}", count)

    def read(self, what: str = "in", token: str = "1:c", tenant: str = "ann") -> int:
        found = self.counts.read(self, token, [tenant], MODELS)
        return found[tenant][what]


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> UsedYard:
    return UsedYard(connection, keys, monkeypatch)


def test_what_was_used_before_the_first_look_does_not_count(yard: UsedYard) -> None:
    yard.use(100)
    assert yard.read() == 0
    yard.use(5)
    yard.use(3, model="")
    assert yard.read() == 8
    assert yard.read() == 8


def test_everything_is_counted_across_midnight_and_pruning(yard: UsedYard) -> None:
    yard.use(100)
    yard.read()
    # Given tokens in the last and in the first seconds of a day, and no look between them
    yard.use(5)
    yard.day = "20261124"
    yard.use(7)
    assert yard.read() == 12
    # If the day before is pruned, I expect no less.
    yard.connection.hdel(yard.keys.usage("ann"), "20261123 sim in")
    yard.use(1)
    assert yard.read() == 13
    # Nor if somebody sets what is counted.
    yard.connection.hset(yard.keys.usage("ann"), "20261124 sim in", "x")
    assert yard.read() == 13
    yard.connection.hset(yard.keys.usage("ann"), "20261124 sim in", 4)
    assert yard.read() == 17


def test_another_term_counts_from_its_beginning(yard: UsedYard) -> None:
    """What was used between two terms is the other leader's."""
    yard.read()
    yard.use(5)
    assert yard.read() == 5
    yard.use(1000)
    assert yard.read(token="3:c") == 5
    yard.use(1)
    assert yard.read(token="3:c") == 6


def test_a_tenant_that_was_away_begins_again(yard: UsedYard) -> None:
    yard.read()
    yard.use(5)
    assert yard.read() == 5
    assert yard.read(tenant="bob") == 0
    assert yard.read() == 0


def test_every_count_of_a_usage_is_read(yard: UsedYard) -> None:
    yard.read()
    for at, what in enumerate(WHATS, 1):
        yard.use(at, what)
    assert [yard.read(what) for what in WHATS] == list(range(1, len(WHATS) + 1))


def test_what_is_no_hash_hides_no_other_tenant(yard: UsedYard) -> None:
    yard.connection.set(yard.keys.usage("odd"), "x")
    tenants = ["odd", "ann"]
    for _ in range(2):
        found = yard.counts.read(yard, "1:c", tenants, MODELS)
        yard.use(2)
    assert (found["odd"]["in"], found["ann"]["in"]) == (0, 2)
