"""Which requests go where, and when: late binding, priorities, policies, the deterministic mode."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import coordinator.dispatch.dispatcher
import coordinator.dispatch.waits
import coordinator.roster
from tests.support.builders import make_request
from tests.support.lanes import Lanes, requests
from tests.support.schedules import read_decisions
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.protocol.control import ALL, DesiredState, encode_desired
from tokenyard.protocol.keys import CLASS_WEIGHTS
from tokenyard.protocol.wire import Request

#: Places in which each class has its share.
ROUND = sum(CLASS_WEIGHTS.values())


class TestLateBinding:
    def test_a_lane_holds_no_more_than_its_limit(self, lanes: Lanes) -> None:
        # Given two workers with room for three and five, and a hundred requests
        small, large = lanes.worker("a", lane_limit=3), lanes.worker("b", lane_limit=5)
        lanes.coordinator()
        lanes.push(requests(100))

        # I expect the lanes to be filled, and all else to wait in the intake,
        lanes.wait_for_load(small, 3)
        lanes.wait_for_load(large, 5)
        assert lanes.waiting() == 92

        # also while places become free one by one.
        for left in range(91, 71, -1):
            lanes.finish(small, lanes.lane(small)[0])
            eventually(lambda: lanes.waiting() == left)  # noqa: B023 - asked before it changes
            assert lanes.load(small) <= 3
            assert lanes.load(large) == 5

    def test_reading_ahead_is_bounded(self, lanes: Lanes) -> None:
        # Given a full worker and far more requests than it can take
        worker = lanes.worker(lane_limit=2)
        lanes.coordinator(max_batch=8, max_held=40)
        lanes.push(requests(500))
        lanes.wait_for_load(worker, 2)

        # I expect the coordinator to have read some of them, and the rest to lie untouched.
        eventually(lambda: lanes.held() >= 40)
        assert lanes.serve([worker], 10)
        assert lanes.held() <= 40 + 2 * 8


class TestReasons:
    """What a request waited for stays in its ledger, for `tokenyard explain`."""

    @pytest.fixture(autouse=True)
    def any_wait_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coordinator.dispatch.waits, "LEAST_MS", 0.0)

    def wait(self, lanes: Lanes) -> Request:
        """A request that a coordinator holds, and that has not waited for it to lead."""
        lanes.coordinator()
        lanes.push([make_request()])
        eventually(lambda: lanes.held() == 1)
        lanes.push([request := make_request()])
        eventually(lambda: lanes.held() == 2)
        return request

    def why(self, lanes: Lanes, request: Request) -> str:
        ledger = lanes.connection.hgetall(lanes.keys.ledger(request.client, request.id))
        return ledger[b"t1"].decode()

    def test_no_worker_was_ready(self, lanes: Lanes) -> None:
        request = self.wait(lanes)

        lanes.wait_for_load(lanes.worker(), 2)

        told = r"round_robin, load \d of 1000; for \d+\.\d s no worker was ready"
        assert re.search(told, self.why(lanes, request))

    def test_its_workers_were_paused(self, lanes: Lanes) -> None:
        worker = lanes.worker()
        state = DesiredState(run_state="PAUSED", by="olga@host", why="an update")
        lanes.connection.hset(lanes.keys.desired, ALL, encode_desired(state))
        request = self.wait(lanes)

        lanes.connection.delete(lanes.keys.desired)
        lanes.wait_for_load(worker, 2)

        assert "its workers were paused by olga@host: an update" in self.why(lanes, request)

    def test_all_places_were_taken(self, lanes: Lanes) -> None:
        worker = lanes.worker(lane_limit=1)
        lanes.coordinator()
        first, second = requests(2)
        lanes.push([first])
        lanes.wait_for_load(worker, 1)
        lanes.push([second])
        eventually(lambda: lanes.held() == 1)
        (began_s, _) = lanes.connection.time()
        eventually(lambda: lanes.connection.time()[0] > began_s)  # so it has waited for some time

        lanes.finish(worker, *lanes.lane(worker))
        eventually(lambda: lanes.ids(worker) == [second.id])

        assert "all places of its workers were taken" in self.why(lanes, second)


class TestPlaces:
    """Events of lanes with room, and when they wake the dispatcher."""

    @pytest.fixture(autouse=True)
    def never_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coordinator.dispatch.dispatcher, "READ_CAPACITY_EVERY_S", math.inf)

    def answer_one(self, lanes: Lanes, worker: str) -> None:
        lanes.push([make_request()])
        lanes.wait_for_load(worker, 1)
        lanes.finish(worker, lanes.lane(worker)[0])

    def test_freed_lanes_do_not_wake_an_idle_dispatcher(self, lanes: Lanes) -> None:
        # Given a coordinator that knows its worker, and has read such events once
        worker = lanes.worker()
        lanes.coordinator()
        self.answer_one(lanes, worker)
        self.answer_one(lanes, worker)
        before = lanes.heard(lanes.keys.capacity)

        # I expect it to continue without reading any.
        for _ in range(5):
            self.answer_one(lanes, worker)
        assert (
            lanes.heard(lanes.keys.capacity) == before < lanes.connection.xlen(lanes.keys.capacity)
        )

    def test_a_policy_with_loads_reads_every_freed_lane(self, lanes: Lanes) -> None:
        worker = lanes.worker()
        lanes.coordinator(policy="least_loaded")

        for count in range(1, 4):
            self.answer_one(lanes, worker)
            eventually(lambda: lanes.heard(lanes.keys.capacity) == count)  # noqa: B023 - asked before it changes

    def test_a_waiting_request_gets_a_freed_lane(
        self, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given more requests than room, and loads that are not read again meanwhile
        worker = lanes.worker(lane_limit=2)
        monkeypatch.setattr(coordinator.roster, "REFRESH_S", math.inf)
        lanes.coordinator()
        lanes.push(requests(6))

        # I expect each place that becomes free to be taken.
        for left in (3, 2, 1, 0):
            lanes.wait_for_load(worker, 2)
            lanes.finish(worker, lanes.lane(worker)[0])
            eventually(lambda: lanes.waiting() == left)  # noqa: B023 - asked before it changes


class TestClients:
    def test_a_client_that_floods_does_not_delay_another(self, lanes: Lanes) -> None:
        # Given a client with hundreds of waiting requests
        worker = lanes.worker(lane_limit=1)
        lanes.coordinator()
        lanes.push([make_request(f"f{n}", client="flood") for n in range(400)])
        lanes.wait_for_load(worker, 1)

        # If others ask for one each, also by plain XADD, I expect them to be among the next.
        lanes.push([make_request("a", client="ann")])
        bob = make_request("b", client="bob")
        lanes.connection.xadd(
            lanes.keys.intake("normal"), {"id": "b", "client": "bob", "prompt": bob.prompt or "x"}
        )

        assert {"a", "b"} < set(lanes.serve([worker], 6))


class TestPriorities:
    def test_high_overtakes_waiting_requests(self, lanes: Lanes) -> None:
        # Given a full worker, and waiting normal requests, read or unread
        worker = lanes.worker(lane_limit=1)
        lanes.coordinator()
        lanes.push(requests(40, "n"))
        lanes.wait_for_load(worker, 1)

        # If high ones come
        high = lanes.push(requests(3, "h"), "high")

        # I expect them to be next.
        assert lanes.serve([worker], 4) == ["n0000", *high]

    def test_low_is_not_starved_by_requests_that_keep_coming(self, lanes: Lanes) -> None:
        # Given a waiting low request, and a new high one for each place
        worker = lanes.worker(lane_limit=1)
        lanes.coordinator()
        lanes.push(requests(1, "blocker"))
        lanes.wait_for_load(worker, 1)
        (low,) = lanes.push(requests(1, "l"), "low")

        served = []
        for high in requests(3 * ROUND, "h"):
            lanes.push([high], "high")
            served += lanes.serve([worker], 1)
            eventually(lambda: lanes.load(worker) == 1)

        assert low in served


class TestExpectedWorkers:
    def test_nothing_is_dispatched_before_the_expected_workers_have_joined(
        self, lanes: Lanes
    ) -> None:
        # Given a coordinator that expects two workers, and one that has joined
        lanes.coordinator(expect_workers=2, block_ms=50)
        first = lanes.worker("a")
        lanes.push(requests(4))
        eventually(lambda: lanes.connection.hget(lanes.keys.info, "models") == b'["sim"]')

        # I expect it to wait for the second,
        assert lanes.waiting() == 4
        assert lanes.load(first) == 0

        # also if the first is registered twice, as after a restart,
        again = lanes.worker("a")
        events = lanes.connection.xlen(lanes.keys.events)
        eventually(lambda: lanes.heard(lanes.keys.events) == events)
        assert lanes.waiting() == 4
        lanes.scripts.retire(first, "left")

        # and then to begin.
        second = lanes.worker("b")
        eventually(lambda: lanes.waiting() == 0)
        assert (lanes.load(again), lanes.load(second)) == (2, 2)


class TestDeterministic:
    def _record(self, lanes: Lanes, path: Path, order: list[str], limit: int, **values) -> None:
        """Run 60 requests; ``order`` is the order in which the workers join and are served."""
        lanes.coordinator(deterministic=True, expect_workers=3, record=path, **values)
        workers = [lanes.worker(name, lane_limit=limit) for name in order]
        lanes.push(requests(30))
        lanes.serve(workers, 20)
        lanes.push(requests(30, "s"))
        lanes.serve(workers, 40)

    def test_two_deterministic_runs_are_equal(self, broker: Server, tmp_path: Path) -> None:
        # Given two runs that differ in the order of joining, and in speed and size of workers
        for name, order, limit in (("one", ["a", "b", "c"], 2), ("two", ["c", "a", "b"], 7)):
            with Lanes(broker.url) as lanes:
                self._record(lanes, tmp_path / name, order, limit)

        # I expect the same decisions, a function of the order of arrival alone.
        one = read_decisions(tmp_path / "one")
        assert one == read_decisions(tmp_path / "two")
        assert [decision.worker for decision in one] == ["a", "b", "c"] * 20

    def test_duplicates_take_a_turn_each_however_they_are_read(
        self, broker: Server, tmp_path: Path
    ) -> None:
        # Given the same id twice, read in one batch or in two
        for name, limit in (("one", 1), ("two", 50)):
            with Lanes(broker.url) as lanes:
                workers = [lanes.worker(w, lane_limit=limit) for w in ("a", "b", "c")]
                lanes.coordinator(deterministic=True, expect_workers=3, record=tmp_path / name)
                batch = requests(8)
                lanes.push([batch[0], batch[1], batch[1], *batch[2:]])
                lanes.serve(workers, 8)

        assert read_decisions(tmp_path / "one") == read_decisions(tmp_path / "two")
