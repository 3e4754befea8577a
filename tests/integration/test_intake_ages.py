"""How long the oldest request of each class waits, in common intakes and in those of tenants."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tokenyard.protocol.keys import Keys, PriorityClass, Yard, intake_name
from tokenyard.telemetry.queues import MOST_OF_LINE, read_ages_ms, read_oldest_ms
from tokenyard.yard.history import read_snapshot

NOW_MS = 2_000_000_000_000


class WaitingYard(Yard):
    """A yard with entries of any age."""

    def wait(self, priority_class: PriorityClass, tenant: str, *seconds: int) -> None:
        """Requests that have waited so long, the oldest first; a tenant is behind all in line."""
        for age_s in seconds:
            intake = self.keys.intake(intake_name(priority_class, tenant))
            self.connection.xadd(intake, {"id": "q"}, id=f"{NOW_MS - 1000 * age_s}-0")
        if tenant:
            self.connection.zadd(self.keys.line, {tenant: self.connection.zcard(self.keys.line)})

    def oldest_s(self) -> dict[Any, int]:
        found = read_oldest_ms(self, NOW_MS)
        return {name: age_ms // 1000 for name, age_ms in found.items()}


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys) -> WaitingYard:
    return WaitingYard(connection, keys)


def test_an_empty_yard_has_no_age(yard: WaitingYard) -> None:
    assert yard.oldest_s() == dict.fromkeys(("retry", "high", "normal", "low"), 0)


def test_where_all_have_tenants_the_oldest_of_each_class_counts(yard: WaitingYard) -> None:
    yard.wait("normal", "ann", 40, 30)
    yard.wait("normal", "bob", 90, 20)
    yard.wait("low", "bob", 500)
    assert yard.oldest_s() == {"retry": 0, "high": 0, "normal": 90, "low": 500}
    assert read_snapshot(yard).oldest_ms.keys() == yard.oldest_s().keys()
    ages = read_ages_ms(yard, ["ann", "no/name"], NOW_MS)
    assert ages == {"ann": {"high": 0, "normal": 40_000, "low": 0}}


def test_a_common_request_may_be_the_oldest(yard: WaitingYard) -> None:
    yard.wait("normal", "ann", 40)
    yard.wait("normal", "", 60)
    yard.connection.zadd(yard.keys.line, {"": 0, "no/name": 1})
    assert yard.oldest_s()["normal"] == 60


def test_an_entry_of_the_future_has_no_age(yard: WaitingYard) -> None:
    yard.wait("high", "ann", -60)
    assert yard.oldest_s()["high"] == 0


def test_of_a_long_line_both_ends_are_looked_at(yard: WaitingYard) -> None:
    # Given three times as many in line as are looked at from an end
    count = 3 * MOST_OF_LINE
    for at in range(count):
        yard.wait("normal", f"t{at}", 10)
    for at, age_s in ((0, 50), (count - 1, 70), (count // 2, 1_000)):
        yard.connection.delete(yard.keys.intake(f"normal:t{at}"))
        intake = yard.keys.intake(f"normal:t{at}")
        yard.connection.xadd(intake, {"id": "q"}, id=f"{NOW_MS - 1000 * age_s}-0")

    # I expect the ends to be seen, and not the middle, so that the cost is bounded.
    assert yard.oldest_s()["normal"] == 70
    yard.connection.delete(yard.keys.intake(f"normal:t{count - 1}"))
    assert yard.oldest_s()["normal"] == 50
