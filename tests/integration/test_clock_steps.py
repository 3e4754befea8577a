"""A broker whose clock was set by an hour: nothing ends early, nothing is held late."""

from __future__ import annotations

import asyncio

import pytest
from starlette.datastructures import Headers

from coordinator.coordinator import Coordinator
from coordinator.leadership import Leadership
from gateway.http.incoming import read_deadline
from gateway.queue.health import YardHealth
from gateway.queue.yard import _DEADLINE_MARGIN_S, YardQueue
from tests.support.builders import make_request
from tests.support.fake_clock import FakeClock
from tests.support.lanes import LONG_MS, Lanes
from tokenyard import clock
from tokenyard.protocol.replies import to_result
from tokenyard.telemetry.health import Health

HOUR_MS = 3_600_000
#: What a test may take between two looks at the broker's clock.
ABOUT_MS = 60_000


@pytest.fixture
def yard(lanes: Lanes) -> Lanes:
    return lanes


def state(yard: Lanes, request_id: str, client: str = "anon") -> object:
    """The state of a request; None while it has no ledger."""
    return yard.connection.hget(yard.keys.ledger(client, request_id), "state")


def before_the_step(yard: Lanes, leader: Coordinator, step_ms: int) -> int:
    """Have a leader know the broker's clock as it was before somebody set it; that time in ms."""
    old_ms = yard.now_ms - step_ms
    broker_time = leader._roster.broker_time
    broker_time.measured((old_ms // 1000, old_ms % 1000 * 1000), clock.monotonic())
    broker_time.take_step()
    return old_ms


def gone_of(yard: Lanes, worker: str) -> list[tuple[str, str]]:
    """Where the leases are of those who are gone."""
    return [(yard.keys.leases, worker), (yard.keys.clients, "gone")]


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS], ids=["ahead", "back"])
def test_leases_and_deadlines_last_as_long_as_before(yard: Lanes, step_ms: int) -> None:
    # Given a worker, a client and requests, whose leases and deadlines are by the clock of before
    leader = yard.take_lead()
    worker = yard.worker(lane_limit=1, lease_ms=LONG_MS)
    gone = yard.worker("gone", lane_limit=0)
    old_ms = before_the_step(yard, leader, step_ms)
    for client in ("ann", "gone"):
        mine = make_request("attached", client=client, deadline_ms=old_ms + LONG_MS)
        yard.scripts.submit("normal", [mine], watched=client)
    yard.connection.zadd(yard.keys.leases, {worker: old_ms + LONG_MS, gone: old_ms - 1})
    yard.connection.zadd(yard.keys.clients, {"ann": old_ms + LONG_MS, "gone": old_ms - 1})
    late = make_request("late", deadline_ms=old_ms - 1)
    yard.push([make_request("in-time", deadline_ms=old_ms + LONG_MS), late])

    # If the leader finds out
    leader._roster.mark_stale()
    for _ in range(4):
        leader._sweeper._due = leader._rescuer._grace_until = 0.0
        leader.run_once()

    # I expect the leases to last as long as before,
    ends = yard.connection.zscore(yard.keys.leases, worker)
    assert ends == pytest.approx(yard.now_ms + LONG_MS, abs=ABOUT_MS)
    left = yard.connection.zscore(yard.keys.clients, "ann")
    assert left == pytest.approx(yard.now_ms + LONG_MS, abs=ABOUT_MS)
    # those that were over to have ended, or to end after their length,
    over = [yard.connection.zscore(*one) for one in gone_of(yard, gone)]
    if step_ms > 0:
        assert over == [None, None]
        assert state(yard, "attached", "gone") == b"cancelled"
    else:
        assert all(one <= yard.now_ms + LONG_MS for one in over)
    # the same of the deadlines,
    assert to_result(yard.result("late")).status == "expired"
    # and a worker to be told the deadline by the new clock.
    [running] = yard.lane(worker)
    assert running.request.deadline_ms == pytest.approx(yard.now_ms + LONG_MS, abs=ABOUT_MS)
    assert state(yard, "attached", "ann") in {b"waiting", b"assigned"}
    assert state(yard, "in-time") in {None, b"assigned"}


def test_until_the_leader_knows_nothing_ends(yard: Lanes) -> None:
    yard.scripts.submit("normal", [make_request("q", deadline_ms=1)], watched="ann")
    told = yard.now_ms
    for wrong in (told + HOUR_MS, told - HOUR_MS):
        assert yard.scripts.overdue("normal", "-", 10, now_ms=wrong) == ("", [])
        assert yard.scripts.watch_clients(10, now_ms=wrong) == []
    assert yard.scripts.overdue("normal", "-", 10, now_ms=told)[1]


class TestLead:
    """The lease of a leader ends by the broker's clock; a standby has its own."""

    LEASE_MS = 9_000

    @pytest.fixture
    def standby(self, yard: Lanes) -> Leadership:
        return Leadership(yard.scripts, "two", self.LEASE_MS)

    def test_a_lease_that_does_not_move_ends(
        self, yard: Lanes, standby: Leadership, fake_clock: FakeClock
    ) -> None:
        # Given a leader that has died, and a clock that was set back by an hour since
        yard.scripts.lead("one", self.LEASE_MS)
        assert not standby.keep()
        yard.connection.pexpire(yard.keys.leader, HOUR_MS)
        fake_clock.advance(self.LEASE_MS / 9_000)
        assert not standby.keep()

        # I expect a standby to lead when five leases have gone by, of which it is one,
        fake_clock.advance(5 * self.LEASE_MS / 1000 - 1)
        assert not standby.keep()
        fake_clock.advance(1.0)
        assert standby.keep()
        assert standby.token == "2:two"
        # for the length of its own lease.
        assert yard.connection.pttl(yard.keys.leader) <= self.LEASE_MS

    def test_a_lease_longer_than_our_own_may_stand_still_for_longer(
        self, yard: Lanes, standby: Leadership, fake_clock: FakeClock
    ) -> None:
        yard.scripts.lead("one", LONG_MS)
        assert not standby.keep()
        fake_clock.advance(4 * self.LEASE_MS / 1000)
        assert not standby.keep()
        fake_clock.advance(self.LEASE_MS / 1000)
        assert standby.keep()

    def test_a_lease_that_moves_is_not_taken(
        self, yard: Lanes, standby: Leadership, fake_clock: FakeClock
    ) -> None:
        token = yard.scripts.lead("one", HOUR_MS)
        for extended in range(20):
            assert not standby.keep()
            fake_clock.advance(4 * self.LEASE_MS / 1000)
            assert yard.scripts.lead("one", HOUR_MS + extended, token) == token


class TestGateway:
    """A gateway counts by the broker, which it asks once a second."""

    @pytest.mark.parametrize("step_s", [3600.0, -3600.0])
    def test_a_step_of_its_clock_moves_no_deadline(
        self, yard: Lanes, redis_url: str, fake_clock: FakeClock, step_s: float
    ) -> None:
        async def deadlines() -> tuple[int | None, float | None]:
            queue = YardQueue(redis_url, yard.keys.yard)
            health = YardHealth(queue, 60.0, Health(60.0))
            await health._look()
            fake_clock.step(step_s)
            waits = Headers({"x-request-timeout-ms": "60000"})
            deadline_ms = read_deadline(waits, {}, queue.broker_time.now_ms)
            ends_at = queue.give_up(deadline_ms)
            await queue.stop()
            return deadline_ms, ends_at

        deadline_ms, ends_at = asyncio.run(deadlines())
        assert deadline_ms == pytest.approx(yard.now_ms + 60_000, abs=ABOUT_MS)
        assert ends_at == pytest.approx(fake_clock.now + 60 + _DEADLINE_MARGIN_S, abs=0.01)
