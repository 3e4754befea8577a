"""The leader publishes whether the yard has tenants, while it runs."""

from __future__ import annotations

import pytest

from coordinator import handshake
from tests.integration.operating import Opened
from tests.support.tenants import TenantYard


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> TenantYard:
    monkeypatch.setattr(handshake, "TENANTS_REST_S", 0.0)
    return opened(TenantYard)


def turn(yard: TenantYard, times: int = 3) -> None:
    assert yard.leader is not None
    for _ in range(times):
        yard.leader.run_once()


def has_tenants(yard: TenantYard) -> bytes | None:
    found: bytes | None = yard.connection.hget(yard.keys.info, "has_tenants")
    return found


def test_a_yard_has_tenants_once_one_has_settings(yard: TenantYard) -> None:
    yard.lead()
    turn(yard)
    assert has_tenants(yard) == b"0"
    yard.set("ann", weight=2)
    turn(yard)
    assert has_tenants(yard) == b"1"


@pytest.mark.parametrize(
    ("hours", "is_known"), [(0, b"1"), (23, b"1"), (25, b"0"), ("x", b"0"), ("9" * 400, b"0")]
)
def test_a_yard_has_tenants_for_a_day_after_one_has_submitted(
    yard: TenantYard, hours: float | str, is_known: bytes
) -> None:
    came_ms = hours
    if isinstance(hours, int):
        came_ms = str(yard.now_ms - hours * 3_600_000)
    yard.connection.hset(yard.keys.tally, "tenant_came", came_ms)
    yard.lead()
    turn(yard)
    assert has_tenants(yard) == is_known


def test_a_successor_knows_it_at_once(yard: TenantYard) -> None:
    yard.set("ann", weight=2)
    yard.lead()
    yard.connection.hdel(yard.keys.info, "has_tenants")
    yard.lead()
    assert has_tenants(yard) == b"1"


def test_news_are_read_now_and_then_and_not_all_the_time(
    yard: TenantYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "TENANTS_REST_S", 60.0)
    yard.lead()
    yard.set("ann", weight=2)
    turn(yard)
    assert has_tenants(yard) == b"0"  # it was read a moment ago
    assert yard.leader is not None
    yard.leader._tenants._due = 0.0
    turn(yard)
    assert has_tenants(yard) == b"1"


def test_settings_that_cannot_be_read_stop_no_leader(
    yard: TenantYard, caplog: pytest.LogCaptureFixture
) -> None:
    yard.connection.set(yard.keys.tenants, "no hash")
    yard.lead()
    assert has_tenants(yard) == b"0"
    assert "cannot read whether the yard has tenants" in caplog.text
    # Once they can be read again, they are.
    yard.connection.delete(yard.keys.tenants)
    yard.set("ann", weight=2)
    turn(yard)
    assert has_tenants(yard) == b"1"
