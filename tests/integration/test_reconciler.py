"""Requests whose entry was deleted by hand get an answer."""

from __future__ import annotations

import itertools

import pytest
import redis

import coordinator.recovery.reconciler
from coordinator.recovery.reconciler import LedgerReconciler
from coordinator.telemetry.counts import CoordinatorCounts
from tests.support.builders import make_delta, make_request
from tests.support.fake_clock import FakeClock
from tests.support.lanes import Lanes, requests
from tests.support.servers import Server, limited_user
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard import Client, RequestFailed
from tokenyard.clock import BrokerTime
from tokenyard.protocol.keys import INTAKE_CLASSES, Yard
from tokenyard.protocol.leader_reports import LAST, LAST_FOUND, parse_pass
from tokenyard.protocol.replies import to_result
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Publication, Published


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without a pause, so that a test need not wait for a whole pass at leisure."""
    monkeypatch.setattr(coordinator.recovery.reconciler, "EVERY_S", 0.02)


def code(lanes: Lanes, request_id: str) -> str:
    result = to_result(lanes.result(request_id))
    assert result.error is not None
    return result.error.code


def queued_tokens(lanes: Lanes) -> int:
    return int(lanes.connection.hget(lanes.keys.tally, "queued_tokens") or 0)


@pytest.mark.usefixtures("brisk")
class TestIntake:
    def test_requests_of_a_trimmed_intake_end(self, lanes: Lanes) -> None:
        # Given twenty queued requests for a model without a worker
        lanes.coordinator()
        asked = requests(20)
        lanes.scripts.submit("normal", asked)
        eventually(lambda: lanes.held() > 0)

        # If the intake is trimmed by hand
        lanes.connection.xtrim(lanes.keys.intake("normal"), maxlen=2, approximate=False)

        # I expect those that are gone to be answered, and the others to be served.
        assert [code(lanes, one.id) for one in asked[:18]] == ["ENTRY_LOST"] * 18
        tokens = sum(max(1, len(one.tokens or b"") // 4) for one in asked[18:])
        eventually(lambda: queued_tokens(lanes) == tokens)
        worker = lanes.worker()
        assert lanes.wait_for_load(worker, 2) == [one.id for one in asked[18:]]
        eventually(lambda: lanes.held() == 0)

    def test_requests_of_a_deleted_intake_end(self, lanes: Lanes) -> None:
        lanes.coordinator()
        asked = requests(5)
        for name in ("high", "normal", "low"):
            lanes.scripts.submit(name, [asked.pop()])
        lanes.connection.delete(*(lanes.keys.intake(name) for name in INTAKE_CLASSES))

        assert code(lanes, "r0004") == code(lanes, "r0003") == code(lanes, "r0002") == "ENTRY_LOST"
        worker = lanes.worker()
        lanes.scripts.submit("low", asked)
        assert lanes.wait_for_load(worker, 2) == [one.id for one in asked]

    def test_a_waiting_client_gets_entry_lost(self, lanes: Lanes) -> None:
        lanes.worker(lane_limit=1)
        lanes.coordinator()
        with Client(lanes.url, yard=lanes.keys.yard) as client:
            first = client.submit("one")
            eventually(lambda: lanes.waiting() == 0)
            handle = client.submit("two")
            lanes.connection.xtrim(lanes.keys.intake("normal"), maxlen=0, approximate=False)

            with pytest.raises(RequestFailed, match="ENTRY_LOST: somebody deleted") as failed:
                handle.result(timeout=20)
            assert failed.value.code == "ENTRY_LOST"
            first.cancel()

    def test_a_later_leader_finds_earlier_deletions(self, lanes: Lanes) -> None:
        asked = requests(250)
        lanes.scripts.submit("normal", asked)
        lanes.connection.delete(lanes.keys.intake("normal"))

        lanes.coordinator()

        assert {code(lanes, one.id) for one in asked} == {"ENTRY_LOST"}


@pytest.mark.usefixtures("brisk")
class TestLane:
    def test_a_deleted_lane_entry_of_a_lost_worker_ends(self, lanes: Lanes) -> None:
        lanes.coordinator()
        worker = lanes.worker()
        lanes.push(requests(3))
        lanes.wait_for_load(worker, 3)
        lanes.connection.xtrim(lanes.keys.lane(worker), maxlen=1, approximate=False)

        lanes.scripts.retire(worker, "lost", "killed")

        assert code(lanes, "r0000") == code(lanes, "r0001") == "ENTRY_LOST"
        other = lanes.worker()
        assert lanes.wait_for_load(other, 1) == ["r0002"]

    def test_a_worker_may_end_a_request_whose_lane_entry_was_deleted(self, lanes: Lanes) -> None:
        worker, full = lanes.worker(), lanes.worker("full", model="full", lane_limit=1)
        lanes.coordinator()
        lanes.push([make_request("r0000", model="sim"), make_request("f", model="full")])
        lanes.wait_for_load(worker, 1)
        lanes.wait_for_load(full, 1)
        (assignment,) = lanes.lane(worker)
        lanes.connection.delete(lanes.keys.lane(worker))
        for number in range(3):  # passes, each of which ends a request that still waits
            lanes.scripts.submit("low", [make_request(f"lost-{number}", model="full")])
            lanes.connection.delete(lanes.keys.intake("low"))
            assert code(lanes, f"lost-{number}") == "ENTRY_LOST"

        assert lanes.finish(worker, assignment) == [Published.PUBLISHED]
        assert to_result(lanes.result("r0000")).status == "completed"

    @pytest.mark.long
    def test_a_deleted_lane_entry_ends_where_its_worker_is_too_slow(self, lanes: Lanes) -> None:
        lanes.coordinator(lost_entry_wait_s=0.2)
        worker = lanes.worker()
        lanes.push([make_request("a", stream=True)])
        lanes.wait_for_load(worker, 1)
        (assignment,) = lanes.lane(worker)
        lanes.scripts.emit(worker, [Publication(assignment, make_delta("a", 0, [5]))])
        lanes.connection.delete(lanes.keys.lane(worker))

        assert code(lanes, "a") == "ENTRY_LOST"
        assert lanes.finish(worker, assignment) == [Published.REPEATED]
        ((_, told),) = lanes.connection.xrange(lanes.keys.lane(worker))
        assert told == {b"cancel": assignment.entry.encode()}


@pytest.mark.usefixtures("brisk")
def test_the_handshake_reports_what_was_found(lanes: Lanes) -> None:
    lanes.scripts.submit("normal", requests(3))
    lanes.connection.delete(lanes.keys.intake("normal"))
    lanes.coordinator()
    found = eventually(lambda: lanes.connection.hget(lanes.keys.info, LAST_FOUND))
    told = parse_pass(found.decode())
    assert told is not None
    assert (told.ended, told.ledgers >= 3) == (3, True)
    last = lanes.connection.hget(lanes.keys.info, LAST)
    assert parse_pass((last or b"").decode()) is not None


class TestRounds:
    """The reconciler by itself, in a yard that the test leads."""

    @pytest.fixture
    def yard(self, lanes: Lanes) -> PlayedYard:
        return PlayedYard(lanes.connection, lanes.keys, lanes.scripts)

    def test_rounds_continue_immediately_until_all_found_requests_are_ended(
        self, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(coordinator.recovery.reconciler, "MOST_ENDED", 10)
        for request in requests(35):
            yard.submit(request)
        yard.connection.delete(yard.keys.intake("normal"))
        ended = CoordinatorCounts()
        reconciler = LedgerReconciler(yard.scripts, BrokerTime(), ended, patience_s=60)

        counts = []
        while reconciler.has_more:
            reconciler.run_once(yard.token)
            counts.append(ended.results["", "normal", "failed"])
        assert counts[-1] == 35
        assert all(b - a <= 10 for a, b in itertools.pairwise(counts))
        assert ended.results.total() == 35

    def test_a_missed_entry_hurries_a_pass_but_not_all_the_time(
        self, yard: PlayedYard, fake_clock: FakeClock
    ) -> None:
        fake_clock.ticks_s = 1.0  # so that a pass takes some
        reconciler = LedgerReconciler(
            yard.scripts, BrokerTime(), CoordinatorCounts(), patience_s=60
        )
        assert reconciler.has_more
        while reconciler.has_more:
            reconciler.run_once(yard.token)
        reconciler.hurry()
        assert not reconciler.has_more
        fake_clock.advance(100_000.0)
        reconciler.hurry()
        assert reconciler.has_more

    def test_a_user_without_scan_is_warned(
        self, yard: PlayedYard, broker: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            limited_user(broker.url, "+@all", "-scan") as url,
            redis.Redis.from_url(url) as connection,
        ):
            scripts = Scripts(Yard(connection, yard.keys))
            reconciler = LedgerReconciler(scripts, BrokerTime(), CoordinatorCounts(), patience_s=60)
            reconciler.run_once(yard.token)
            assert not reconciler.has_more
            assert "will not be noticed" in caplog.text


@pytest.mark.usefixtures("brisk")
class TestLine:
    def test_a_tenant_that_somebody_took_out_of_the_line_is_served(self, lanes: Lanes) -> None:
        # Given a tenant with requests, of whom the line knows nothing
        asked = [make_request(f"q{number}", tenant="acme") for number in range(3)]
        lanes.scripts.submit("normal", asked)
        lanes.connection.delete(lanes.keys.line)

        # I expect a leader to find it, also where its counts are wrong.
        lanes.connection.hset(lanes.keys.tenant("acme"), "waiting", 0)
        worker = lanes.worker()
        lanes.coordinator()
        assert lanes.wait_for_load(worker, 3) == ["q0", "q1", "q2"]
