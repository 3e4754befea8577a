"""Tenants become guests, and are none any more, while the leader runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from coordinator.guests import registry
from coordinator.guests.inbox_watcher import IDLE_S, InboxWatcher
from tests.support.servers import Server
from tests.support.tenants import TenantYard, tenant_yard
from tests.support.waiting import eventually
from tokenyard.protocol.receipts import mark_of


@pytest.fixture
def yard(broker: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TenantYard]:
    monkeypatch.setattr(registry, "REST_S", 0.0)
    with tenant_yard(broker.url) as yard:
        yield yard
        if yard.leader:
            yard.leader._inboxes.stop()


def write(yard: TenantYard, guest: str, **fields: str) -> None:
    yard.connection.xadd(yard.keys.inbox(guest), {"prompt": "x", **fields})  # type: ignore[arg-type]


def announced(yard: TenantYard) -> list[str]:
    """Marks of the guests in the handshake."""
    found: list[str] = json.loads(yard.connection.hget(yard.keys.info, "guests") or b"[]")
    return found


def turn_until(yard: TenantYard, tenant: str, waits: int) -> None:
    """Turns of the leader until so many requests of a tenant wait."""
    leader = yard.leader
    assert leader is not None

    def is_so() -> bool:
        leader.run_once()
        return yard.waits(tenant) == waits

    eventually(is_so, every_s=0.001)


def turn(yard: TenantYard, times: int = 3) -> None:
    assert yard.leader is not None
    for _ in range(times):
        yard.leader.run_once()


def test_a_new_guest_is_heard_by_a_leader_that_runs(yard: TenantYard) -> None:
    # Given a leader without guests, and an inbox that nobody reads
    yard.lead()
    write(yard, "ann", id="early", tenant="bob")
    turn(yard)
    assert yard.waits("ann") == 0
    assert announced(yard) == []
    # If its tenant becomes a guest,
    yard.set("ann", guest=True)
    turn_until(yard, "ann", 1)
    # I expect its request to be its own tenant's, and clients to be told.
    assert yard.waits("bob") == 0
    assert announced(yard) == [mark_of(yard.keys.yard, "ann")]


def test_who_is_no_guest_any_more_is_not_heard(yard: TenantYard) -> None:
    yard.set("ann", guest=True)
    yard.set("bob", guest=True)
    yard.lead()
    write(yard, "ann", id="first")
    turn_until(yard, "ann", 1)
    # Also where the event was lost: nothing is read of an inbox whose tenant may not.
    yard.connection.hset(yard.keys.tenants, "ann", "{}")
    write(yard, "ann", id="second")
    write(yard, "bob", id="first")
    turn_until(yard, "bob", 1)
    turn(yard)
    assert yard.waits("ann") == 1
    assert yard.connection.xlen(yard.keys.inbox("ann")) == 1
    # With the event it is told, too.
    yard.set("ann")
    turn(yard)
    assert announced(yard) == [mark_of(yard.keys.yard, "bob")]


def test_a_successor_knows_the_guests_at_once(yard: TenantYard) -> None:
    yard.set("ann", guest=True)
    yard.lead(guests=("old",))
    marks = [mark_of(yard.keys.yard, name) for name in ("old", "ann")]
    assert announced(yard) == marks
    yard.connection.hdel(yard.keys.info, "guests")
    yard.lead(guests=("old",))
    assert announced(yard) == marks


def test_guests_of_the_settings_need_no_registry(yard: TenantYard) -> None:
    yard.lead(guests=("old",))
    yard.set("old", weight=2)  # a tenant that nobody has made a guest in the registry
    write(yard, "old", id="first")
    turn_until(yard, "old", 1)


def test_one_of_two_with_names_alike_is_not_heard(
    yard: TenantYard, caplog: pytest.LogCaptureFixture
) -> None:
    """The other could use its name, and read its replies; `tenants set` refuses it."""
    yard.set("ann", guest=True)
    yard.set("ann-b", guest=True)
    yard.set("old-c", guest=True)
    yard.lead(guests=("old",))
    assert announced(yard) == [mark_of(yard.keys.yard, name) for name in ("old", "ann")]
    assert "guest ann-b is not heard: its name is one of guest ann" in caplog.text
    assert "guest old-c is not heard: its name is one of guest old" in caplog.text


@pytest.mark.parametrize("name", ["http.bob", "http", "anon", "gateway", "batch_1", "client-1"])
def test_the_name_of_a_client_that_the_system_makes_is_not_heard(
    yard: TenantYard, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It would submit and cancel as that client; written by hand, since commands refuse it."""
    yard.connection.hset(yard.keys.tenants, name, b'{"guest":true}')
    yard.set("ann", guest=True)
    write(yard, name, id="first")
    write(yard, "ann", id="first")
    yard.lead()
    turn_until(yard, "ann", 1)
    assert yard.waits(name) == 0
    assert announced(yard) == [mark_of(yard.keys.yard, "ann")]
    assert f"guest {name} is not heard: the system gives such names itself" in caplog.text


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
        came_ms = str(yard.connection.time()[0] * 1000 - hours * 3_600_000)
    yard.connection.hset(yard.keys.tally, "tenant_came", came_ms)
    yard.lead()
    turn(yard)
    assert has_tenants(yard) == is_known


def test_settings_that_cannot_be_read_make_no_guest(yard: TenantYard) -> None:
    stored = {"ann": b'{"guest":1}', "bob": b'{"guest"', "a/b": b'{"guest":true}', "cem": b"{}"}
    yard.connection.hset(yard.keys.tenants, mapping=stored)  # type: ignore[arg-type]
    yard.connection.hset(yard.keys.tenants, "dee", b'{ "guest" : true }')
    yard.lead()
    assert announced(yard) == [mark_of(yard.keys.yard, "dee")]


def test_guests_beyond_the_bound_are_not_heard(
    yard: TenantYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MOST_GUESTS", 3)
    stored = {f"t{number}": b'{"guest":true}' for number in range(5)}
    yard.connection.hset(yard.keys.tenants, mapping=stored)  # type: ignore[arg-type]
    yard.lead()
    assert len(announced(yard)) == 3


def test_news_are_read_now_and_then_and_not_all_the_time(
    yard: TenantYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "REST_S", 60.0)
    yard.lead()
    yard.set("ann", guest=True)
    turn(yard)
    assert announced(yard) == []  # it was read a moment ago
    assert yard.leader is not None
    yard.leader._guests._due = 0.0
    turn(yard)
    assert announced(yard) == [mark_of(yard.keys.yard, "ann")]


def test_many_guests_leave_time_to_others(yard: TenantYard) -> None:
    """A thousand inboxes are looked at ten times a second, one fifty times."""
    for count, pause_s in ((1, IDLE_S), (1_000, 0.1)):
        watcher = InboxWatcher(yard.url, yard.keys, [f"g{number}" for number in range(count)])
        watcher._taken_until = math.inf
        assert watcher._poll(yard.connection) == pytest.approx(pause_s)


def test_a_registry_that_cannot_be_read_stops_no_leader(
    yard: TenantYard, caplog: pytest.LogCaptureFixture
) -> None:
    yard.connection.set(yard.keys.tenants, "no hash")
    yard.lead(guests=("old",))
    assert announced(yard) == [mark_of(yard.keys.yard, "old")]
    assert "cannot read which tenants are guests" in caplog.text
    # Once it can be read again, it is.
    yard.connection.delete(yard.keys.tenants)
    yard.set("ann", guest=True)
    turn(yard)
    assert announced(yard)[1:] == [mark_of(yard.keys.yard, "ann")]
