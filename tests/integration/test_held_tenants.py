"""Tenants that run as many requests as they may leave no place empty, and continue themselves."""

from __future__ import annotations

import math

import pytest

import coordinator.dispatch.tenant_intakes
import coordinator.dispatch.tenant_shares
from tests.integration.operating import Opened
from tests.support.tenants import TenantYard, tenants

#: Of the line, for these tests.
PAGE = 2


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> TenantYard:
    monkeypatch.setattr(coordinator.dispatch.tenant_intakes, "PAGE", PAGE)
    return opened(TenantYard)


def ignore_the_clock(yard: TenantYard) -> None:
    """Whatever happens from here on comes from events, not from the roster's next reading."""
    assert yard.leader is not None
    yard.leader._roster._due = math.inf


def turns_until_load(yard: TenantYard, worker: str, load: int, most: int) -> int:
    """The turns that the leader takes until a lane has so many requests."""
    assert yard.leader is not None
    for turn in range(most):
        if yard.load(worker) >= load:
            return turn
        yard.leader.run_once()
    raise AssertionError(f"{yard.load(worker)} on the lane after {most} turns")


def comes_to_rest(yard: TenantYard, most: int = 50) -> bool:
    """Whether the leader ends a turn with nothing to do at once, but for what is due by the clock.

    A reading of the lanes or intakes, which begins every few seconds, takes some turns.
    """
    assert yard.leader is not None
    for _ in range(most):
        yard.leader.run_once()
        if yard.leader._dispatcher._patience_ms > 0:
            return True
    return False


def fill_the_front(yard: TenantYard) -> str:
    """Many tenants that run all they may, with more waiting, in front of the line; the worker."""
    worker = yard.worker(lane_limit=100)
    for number in range(5 * PAGE):
        yard.set(f"a{number}", max_running_requests=1)
        yard.ask(f"a{number}", 3)
    yard.lead()
    return worker


def test_held_tenants_in_front_leave_no_place_empty(yard: TenantYard) -> None:
    worker = fill_the_front(yard)
    assert yard.load(worker) == 5 * PAGE

    # If others come, which stand behind them, I expect these to run in a few turns.
    ignore_the_clock(yard)
    for number in range(4):
        yard.ask(f"z{number}")
        turns_until_load(yard, worker, 5 * PAGE + 1 + number, most=3)


def test_a_leader_that_finds_held_tenants_in_front_looks_behind_them(yard: TenantYard) -> None:
    worker = fill_the_front(yard)
    yard.connection.zadd(yard.keys.service, {"z": 1000})
    yard.ask("z")
    yard.connection.zadd(yard.keys.line, {"z": 1000})

    # If another takes over, I expect it to get there, a page more in each turn.
    yard.lead(name="successor")
    turns_until_load(yard, worker, 5 * PAGE + 1, most=10)
    assert tenants(yard.ids(worker))["z"] == 1


def test_a_held_tenant_far_back_continues_when_its_request_ends(yard: TenantYard) -> None:
    # Given tenants in front who want a model without room, and one behind them with a limit
    yard.worker("busy", lane_limit=0, model="busy")
    idle = yard.worker("idle", lane_limit=10, model="idle")
    for number in range(3 * PAGE):
        yard.ask(f"t{number}", 2, model="busy")
    yard.set("z", max_running_requests=1)
    yard.connection.zadd(yard.keys.service, {"z": 1000})
    yard.ask("z", 5, model="idle")
    yard.lead()
    turns_until_load(yard, idle, 1, most=10)

    # As its requests end, I expect the next one to run.
    ignore_the_clock(yard)
    for _ in range(4):
        yard.end(idle, *yard.lane(idle))
        turns_until_load(yard, idle, 1, most=5)


def test_a_held_tenant_does_not_hide_an_idle_model(yard: TenantYard) -> None:
    # Given a tenant at its limit that waits for a model with room, behind others that want another
    yard.worker("busy", lane_limit=0, model="busy")
    idle = yard.worker("idle", lane_limit=10, model="idle")
    yard.set("a", max_running_requests=1)
    yard.ask("a", 3, model="idle")
    for number in range(3 * PAGE):
        yard.ask(f"t{number}", 2, model="busy")
    yard.connection.zadd(yard.keys.service, {"z": 1000})
    yard.ask("z", 1, model="idle")
    yard.connection.zadd(yard.keys.line, {"z": 1000})

    yard.lead()
    turns_until_load(yard, idle, 2, most=10)

    assert tenants(yard.ids(idle)) == {"a": 1, "z": 1}


@pytest.mark.long
def test_a_limit_that_only_scripts_can_read_stops_nobody_else(yard: TenantYard) -> None:
    # Given settings of which the leader can read nothing, and the scripts the limit
    worker = yard.worker(lane_limit=4)
    yard.connection.hset(yard.keys.tenants, "a", '{"max_running_requests":1,"weight":0}')
    yard.ask("a", 30)
    yard.ask("b", 30)
    yard.lead()

    # I expect the other to get the places that it cannot have, and the leader to rest.
    ignore_the_clock(yard)
    for _ in range(8):
        assert tenants(yard.ids(worker)) == {"a": 1, "b": 3}
        yard.end(worker, next(one for one in yard.lane(worker) if one.request.tenant == "b"))
        yard.rest()
    assert comes_to_rest(yard)


def test_more_tenants_than_are_remembered_have_their_weights(
    yard: TenantYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.dispatch.tenant_shares, "MOST_KNOWN", 2 * PAGE)
    worker = yard.worker(lane_limit=3)
    for number in range(6 * PAGE):
        yard.set(f"t{number}", weight=4)
        yard.ask(f"t{number}", 2)
    leader = yard.lead()

    rates = []
    while lane := yard.lane(worker):
        for one in lane:
            ledger = yard.keys.ledger(one.request.client, one.request.id)
            rates.append(float(yard.connection.hget(ledger, "charge").split()[1]))
        yard.end(worker, lane[0])
        leader.run_once()

    assert set(rates) == {1 / 4}


def test_requests_for_a_model_without_room_do_not_hide_others_of_their_tenant(
    yard: TenantYard,
) -> None:
    # Given a tenant with more requests for a full model than are read of it, then some for another
    yard.worker("busy", lane_limit=0, model="busy")
    idle = yard.worker("idle", lane_limit=10, model="idle")
    yard.ask("a", 30, model="busy")
    yard.ask("a", 3, model="idle")
    for number in range(3):
        yard.ask(f"t{number}", model="busy")

    # I expect these to run, although all in line could not have so many in memory.
    yard.lead(max_held=40)
    turns_until_load(yard, idle, 3, most=10)
    ignore_the_clock(yard)
    yard.rest()
    assert comes_to_rest(yard)
