"""Tenants with a real leader: who is served when, and what it costs those without tenants."""

from __future__ import annotations

import pytest

import coordinator.dispatch.tenant_intakes
from coordinator.dispatch.tenant_shares import USUAL_AT_FIRST
from tests.integration.operating import Opened
from tests.support.builders import make_request
from tests.support.tenants import TenantYard, commands, tenants
from tests.support.waiting import eventually
from tokenyard.protocol.wire import request_fields
from tokenyard.scripts.calls import digest

#: What a turn of a leader sends: it reads, and dispatches.
TURN = ["XREAD", "EVALSHA"]


@pytest.fixture
def yard(opened: Opened) -> TenantYard:
    return opened(TenantYard)


class TestShares:
    @pytest.mark.long
    def test_a_flood_of_one_tenant_does_not_delay_another(self, yard: TenantYard) -> None:
        # Given a tenant with hundreds of waiting requests
        worker = yard.worker(lane_limit=1)
        yard.ask("flood", 400)
        yard.lead()

        # If another one asks now and then
        served = yard.run(worker, 3)
        for _ in range(5):
            yard.ask("light")
            served += yard.run(worker, 3)

            # I expect it to be next each time, or the one after that: it starts where they are.
            assert tenants(served[-3:])["light"] == 1

    def test_shares_follow_the_weights(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=4)
        for name, weight in (("a", 1), ("b", 2), ("c", 4)):
            yard.set(name, weight=weight)
            yard.ask(name, 80)
        yard.lead()

        served = tenants(yard.run(worker, 70))

        assert all(
            abs(served[name] - share) <= 2 for name, share in zip("abc", (10, 20, 40), strict=True)
        )

    def test_shares_count_tokens_and_not_requests(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=1)
        yard.ask("long", 30, tokens=40, output=80)
        yard.ask("short", 80, tokens=10, output=20)
        yard.lead()

        served = yard.run(worker, 50, output=None)

        assert tenants(served) == {"long": 10, "short": 40}

    def test_what_a_request_did_not_use_is_given_back(self, yard: TenantYard) -> None:
        # Given answers that are much shorter than they may be
        worker = yard.worker(lane_limit=4)
        yard.ask("a", 10, tokens=10, output=400)
        yard.lead()
        assert yard.service("a") == 4 * (10 + 2 * USUAL_AT_FIRST)

        yard.run(worker, 10, output=3)

        assert yard.service("a") == pytest.approx(10 * (10 + 2 * 3))

    def test_a_retry_is_charged_by_its_weight_by_any_leader(self, yard: TenantYard) -> None:
        # Given a request of a tenant with a weight, whose worker is lost
        first = yard.worker("first")
        yard.set("a", weight=4)
        yard.ask("a")
        yard.lead()
        assert yard.load(first) == 1
        yard.connection.zadd(yard.keys.leases, {first: 0})
        second = yard.worker("second")

        # If a new leader, which has not seen its tenant in line, gives it to another worker
        yard.lead()
        yard.end(second, *yard.lane(second), output=20)

        assert yard.service("a") == pytest.approx((10 + 2 * 20) / 4)

    def test_no_charge_outlives_its_attempt(self, yard: TenantYard) -> None:
        # Given a request without a tenant that was charged, since a tenant waited
        first = yard.worker("first", lane_limit=1)
        _, mine = yard.ask("", 2)
        yard.ask("a", 9)
        yard.lead()
        while yard.ids(first) != [mine.id]:
            yard.end(first, *yard.lane(first))
            yard.rest()
        ledger = yard.keys.ledger(mine.client, mine.id)
        assert yard.connection.hexists(ledger, "charge")

        # If its worker is lost, and it is served again when nobody else waits
        yard.connection.delete(yard.keys.intake("normal:a"), yard.keys.line)
        yard.connection.zadd(yard.keys.leases, {first: 0})
        second = yard.worker("second")
        yard.rest()
        yard.end(second, *yard.lane(second))

        assert yard.connection.hget(ledger, "state") == b"completed"
        assert not yard.connection.hexists(ledger, "charge")

    def test_weights_are_effective_at_once(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=1)
        yard.ask("a", 80)
        yard.ask("b", 80)
        yard.lead()
        assert tenants(yard.run(worker, 20)) == {"a": 10, "b": 10}

        yard.set("b", weight=4)

        served = tenants(yard.run(worker, 50))
        assert abs(served["b"] - 40) <= 1

    def test_those_without_a_tenant_are_as_one(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=1)
        yard.ask("", 60)
        yard.ask("a", 60)
        yard.lead()

        served = tenants(yard.run(worker, 40))

        assert abs(served["a"] - 20) <= 1

    def test_a_rest_saves_nothing_up(self, yard: TenantYard) -> None:
        # Given a tenant that has had nothing while another was served for long
        worker = yard.worker(lane_limit=1)
        yard.ask("busy", 200)
        yard.lead()
        yard.run(worker, 60)

        # If it comes now, I expect the two to be served in turn.
        yard.ask("rested", 100)

        assert abs(tenants(yard.run(worker, 40))["rested"] - 20) <= 1

    def test_high_comes_first_inside_a_tenant_alone(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=1)
        yard.ask("a", 40, priority_class="low")
        yard.ask("a", 40, priority_class="high")
        yard.ask("b", 40)
        yard.lead()

        served = yard.run(worker, 34)

        assert abs(tenants(served)["b"] - 17) <= 1
        high = [one for one in served if one.startswith("a-") and int(one[2:]) > 40]
        assert len(high) >= 15


class TestPlaces:
    def test_no_place_stays_empty_while_anybody_waits(self, yard: TenantYard) -> None:
        one, two = yard.worker("one", lane_limit=7), yard.worker("two", lane_limit=6)
        yard.lead()

        yard.ask("a", 40)
        yard.rest()
        assert (yard.load(one), yard.load(two)) == (7, 6)

        yard.end(one, *yard.lane(one)[:5])
        yard.ask("b", 2)
        yard.rest()
        assert (yard.load(one), yard.load(two)) == (7, 6)

    def test_a_model_that_only_those_far_back_want_is_not_idle(
        self, yard: TenantYard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given more tenants than a page, whose model has no room, and behind them one for another
        monkeypatch.setattr(coordinator.dispatch.tenant_intakes, "PAGE", 4)
        yard.worker("busy", lane_limit=0, model="busy")
        idle = yard.worker("idle", lane_limit=10, model="idle")
        for number in range(13):
            yard.ask(f"t{number:02}", 2, model="busy")
        yard.ask("z", 1, model="idle")
        yard.lead()

        yard.rest()

        assert len(yard.ids(idle)) == 1

    def test_a_request_whose_event_was_lost_is_read_before_more_of_another_class(
        self, yard: TenantYard
    ) -> None:
        # Given a leader that knows that a tenant has nothing in another class
        worker = yard.worker(lane_limit=1)
        yard.ask("a", 8, priority_class="low")
        yard.lead()
        # and more events than it reads at once, the first of which the server has not kept.
        urgent = yard.ask("a", priority_class="high")
        yard.connection.xtrim(yard.keys.arrivals, maxlen=0)
        for number in range(256):
            yard.connection.xadd(
                yard.keys.arrivals, {"event": "tenants", "intake": f"low:{number}"}
            )

        served = yard.run(worker, 2)

        assert served[1] == urgent[0].id

    def test_more_tenants_than_a_page_are_all_served_in_turn(
        self, yard: TenantYard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(coordinator.dispatch.tenant_intakes, "PAGE", 4)
        worker = yard.worker(lane_limit=3)
        for number in range(20):
            yard.ask(f"t{number:02}", 4)
        yard.lead()

        served = yard.run(worker, 40)

        assert set(tenants(served[:20]).values()) == {1}
        assert set(tenants(served).values()) == {2}

    def test_a_tenant_at_its_limit_waits_and_the_others_do_not(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=6)
        yard.set("a", max_running_requests=2)
        yard.ask("a", 10)
        yard.ask("b", 10)
        yard.lead()

        assert tenants(yard.ids(worker)) == {"a": 2, "b": 4}
        yard.end(worker, next(one for one in yard.lane(worker) if one.request.tenant == "a"))
        yard.rest()
        assert tenants(yard.ids(worker)) == {"a": 2, "b": 4}


class TestReading:
    def test_an_intake_is_read_in_parts(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=1)
        yard.ask("a", 50)
        yard.lead(max_batch=8, max_held=20)

        served = yard.run(worker, 50)

        assert served == sorted(served)

    def test_entries_that_came_by_xadd_are_moved(self, yard: TenantYard) -> None:
        # Given a full worker, and requests of a tenant that somebody added to a common intake
        worker = yard.worker(lane_limit=1)
        yard.ask("b", 2)
        yard.lead()
        for number in range(3):
            request = make_request(f"a-{number}", tenant="a")
            yard.connection.xadd(yard.keys.intake("low"), dict(request_fields(request)))
        yard.rest()

        # I expect them in the tenant's own, as if it had submitted them.
        assert yard.connection.xlen(yard.keys.intake("low")) == 0
        assert yard.connection.xlen(yard.keys.intake("low:a")) == 3
        assert sorted(yard.line()) == ["a", "b"]
        assert tenants(yard.run(worker, 5)) == {"a": 3, "b": 2}

    def test_cancelled_requests_leave_the_demand(self, yard: TenantYard) -> None:
        yard.worker(lane_limit=1)
        requests = yard.ask("a", 5)
        leader = yard.lead()
        for request in requests[2:]:
            yard.scripts.cancel(request.client, request.id, "test")

        leader._roster.mark_stale()
        yard.rest()

        assert len(leader._intake.backlog) == 1

    def test_entries_deleted_by_hand_are_noticed(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=1)
        yard.ask("a", 1)
        leader = yard.lead()
        yard.ask("b", 3)
        yard.rest()
        yard.connection.delete(yard.keys.intake("normal:b"))
        assert list(yard.line()) == ["b"]

        # I expect the tenant to be out of the line, once the leader has looked for each of them.
        yard.end(worker, *yard.lane(worker))
        eventually(lambda: leader.run_once() or not yard.line())


class TestFailover:
    def test_a_new_leader_goes_on_where_the_last_one_was(self, yard: TenantYard) -> None:
        worker = yard.worker(lane_limit=2)
        yard.ask("a", 60)
        yard.lead()
        yard.run(worker, 10)
        yard.ask("b", 60)
        yard.rest()
        before = {name: yard.service(name) for name in "ab"}

        yard.lead()

        assert {name: yard.service(name) for name in "ab"} == before
        assert abs(tenants(yard.run(worker, 30))["b"] - 15) <= 1


class TestWithoutTenants:
    def test_a_turn_has_the_commands_of_before(self, yard: TenantYard) -> None:
        # Given a yard without tenants that is at work, and does not read its roster now
        worker = yard.worker(lane_limit=2)
        yard.ask("", 9)
        leader = yard.lead()
        for part in (leader._roster, leader._sweeper, leader._reconciler, leader._cancels):
            part._due = float("inf")
        leader._reconciler._hurries = False  # its first pass may not be over yet
        yard.end(worker, *yard.lane(worker))

        # I expect a turn to send nothing but these commands, and the call to name no tenant.
        with commands(yard) as read:
            leader.run_once()
            sent = read()
        assert [command.split()[0] for command in sent] == TURN, sent
        [call] = [command for command in sent if f"EVALSHA {digest('dispatch')}" in command]
        assert not any(word in call for word in ("tenant", "line", "service"))
