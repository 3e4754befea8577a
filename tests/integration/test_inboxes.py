"""Guests get no more than their share of the queue, and their data expires in time."""

from __future__ import annotations

import msgspec
import pytest
import redis

from coordinator.guests.inboxes import Inboxes
from coordinator.telemetry.counts import CoordinatorCounts
from tests.support.lanes import Lanes
from tokenyard.protocol.settings import LEAST_GUEST_TTL_S, CoordinatorSettings

GUESTS = ("ann", "bob")


class AlwaysWritten(Inboxes):
    """The inboxes of ann and bob, which both always have entries."""

    def run_once(self) -> None:
        self._watcher.take = lambda: GUESTS  # type: ignore[method-assign]
        super().run_once()


@pytest.fixture
def inboxes(lanes: Lanes) -> Inboxes:
    """In a yard with room for twenty requests of guests."""
    settings = CoordinatorSettings(
        redis_url=lanes.url, yard=lanes.keys.yard, guests=GUESTS, max_num_queued_reqs=40
    )
    return AlwaysWritten(lanes.connection, lanes.scripts, lanes.keys, settings, CoordinatorCounts())


def write(connection: redis.Redis, inbox: str, **fields: str) -> None:
    connection.xadd(inbox, dict(fields))


def test_a_guest_that_floods_leaves_room_for_others(lanes: Lanes, inboxes: Inboxes) -> None:
    # Given a guest that has written far more than there is room for, and one with one request,
    for number in range(100):
        write(lanes.connection, lanes.keys.inbox("ann"), id=f"a{number}", prompt="x")
    write(lanes.connection, lanes.keys.inbox("bob"), id="b", prompt="x")

    inboxes.run_once()

    # I expect that the one request waits, and no more of the other than fit.
    assert lanes.connection.hget(lanes.keys.ledger("bob", "b"), "state") == b"waiting"
    waiting = sum(lanes.connection.xlen(lanes.keys.intake(name)) for name in ("normal", "low"))
    assert 10 < waiting <= 20


def test_guests_take_turns_for_the_last_place(lanes: Lanes, inboxes: Inboxes) -> None:
    for number in range(19):
        lanes.connection.xadd(lanes.keys.intake("low"), {"id": f"q{number}", "prompt": "x"})
    placed = set()
    for turn in range(4):
        for guest in GUESTS:
            write(lanes.connection, lanes.keys.inbox(guest), id=f"{guest}{turn}", prompt="x")
        inboxes.run_once()
        for guest in GUESTS:
            if lanes.connection.exists(lanes.keys.ledger(guest, f"{guest}{turn}")):
                lanes.scripts.cancel(guest, f"{guest}{turn}", "by a test")
                placed.add(guest)
    assert placed == set(GUESTS)


def test_a_guest_that_is_a_tenant_leaves_room_for_the_next(lanes: Lanes, inboxes: Inboxes) -> None:
    # Given a tenant that floods while nobody else writes
    tenants = lanes.keys.tenants
    lanes.connection.hset(tenants, mapping={"ann": "{}", "bob": "{}"})
    for number in range(100):
        write(lanes.connection, lanes.keys.inbox("ann"), id=f"a{number}", prompt="x")
    inboxes.run_once()
    # I expect that another one finds room at once.
    write(lanes.connection, lanes.keys.inbox("bob"), id="b", prompt="x")
    inboxes.run_once()
    assert lanes.connection.hget(lanes.keys.ledger("bob", "b"), "state") == b"waiting"


def test_only_the_registry_makes_a_guest_a_tenant(lanes: Lanes, inboxes: Inboxes) -> None:
    # Given a guest that the registry knows, and one that it does not
    lanes.connection.hset(lanes.keys.tenants, "ann", "{}")
    for guest in GUESTS:
        write(lanes.connection, lanes.keys.inbox(guest), id="q", prompt="x", tenant="eve")
    inboxes.run_once()
    # I expect the one's request to be its own tenant's, and the other's nobody's.
    assert tenants_of(lanes) == {"ann": "ann", "bob": ""}


def tenants_of(lanes: Lanes) -> dict[str, str]:
    """The tenant of each client's waiting requests."""
    found = {}
    for stream in lanes.connection.scan_iter(f"tokenyard:{{{lanes.keys.yard}}}:intake:*"):
        for _, fields in lanes.connection.xrange(stream):
            common = msgspec.json.decode(fields[b"common"])
            found[common["client"]] = common.get("tenant", "")
    return found


def test_cancels_of_made_up_ids_expire_soon(lanes: Lanes, inboxes: Inboxes) -> None:
    write(lanes.connection, lanes.keys.inbox("ann"), do="cancel", id="nobody")
    inboxes.run_once()
    for key in (lanes.keys.ledger("ann", "nobody"), lanes.keys.reply("ann", "nobody")):
        assert 0 < lanes.connection.ttl(key) <= LEAST_GUEST_TTL_S


def test_ended_requests_do_not_stay_attached(lanes: Lanes, inboxes: Inboxes) -> None:
    # Given a guest that attaches each request and never reports that one has ended
    inbox, attached = lanes.keys.inbox("ann"), lanes.keys.attached("ann")
    for turn in range(20):
        for number in range(5):
            write(lanes.connection, inbox, id=f"q{turn}-{number}", prompt="x", attach="1")
        inboxes.run_once()
        for number in range(5):
            lanes.scripts.cancel("ann", f"q{turn}-{number}", "by a test")
    # I expect that no more is attached than came lately.
    assert 0 < lanes.connection.scard(attached) <= 20
