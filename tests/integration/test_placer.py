"""The placement in a yard: which commands, how often, and the effect on requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.placement import placer
from coordinator.placement.needs import Demand
from coordinator.placement.placer import Placer
from coordinator.roster import Roster
from coordinator.routing.selection import ScheduleWriter
from coordinator.telemetry.counts import CoordinatorCounts
from tests.support.builders import make_request
from tests.support.lanes import LONG_MS, Lanes
from tests.support.schedules import read_placings
from tests.support.waiting import eventually
from tokenyard.scripts.calls import LostLeadership


class Queue:
    """The demand, set by the test."""

    def __init__(self) -> None:
        self.waiting: dict[str, Demand] = {}
        self.asked = 0
        self.failed: list[tuple[str, str]] = []

    def want(self, model: str, requests: int = 1, wait_s: float = 0.0) -> None:
        self.waiting[model] = Demand(model, requests, requests, wait_s)

    def demands(self) -> list[Demand]:
        self.asked += 1
        return list(self.waiting.values())

    def fail_model(self, token: str, model: str, reason: str) -> None:
        self.waiting.pop(model)
        self.failed.append((model, reason))


class Leader:
    """A coordinator of which there is nothing but the placer."""

    def __init__(
        self, lanes: Lanes, record: ScheduleWriter | None = None, **settings: object
    ) -> None:
        self.lanes = lanes
        self.queue = Queue()
        self.roster = Roster(lanes)
        self.token = lanes.scripts.lead("leader", LONG_MS)
        self.placer = Placer(
            lanes.scripts,
            self.roster,
            self.queue,
            lanes.settings(**settings),
            CoordinatorCounts(),
            record,
        )

    def run_once(self, *, refresh: bool = True) -> None:
        """One turn; with ``refresh`` something has just happened in the roster."""
        if refresh:
            self.roster.mark_stale()
            self.roster.refresh()
        self.placer.run_once(self.token)

    def commands(self) -> list[tuple[str, str]]:
        return [(command.worker, command.model) for command in self.lanes.commands()]


class TestOneTurn:
    def test_a_model_with_requests_is_loaded(self, lanes: Lanes, tmp_path: Path) -> None:
        lanes.host("adder", "subtractor")
        worker = lanes.warm()
        record = ScheduleWriter(tmp_path / "record")
        leader = Leader(lanes, record)
        leader.queue.want("adder")

        leader.run_once()

        assert leader.commands() == [(worker, "adder")]
        (command,) = lanes.commands()
        waited = "no worker holds it and 1 request waited up to 0.0 s"
        assert command.why == f"{waited}; a device is free"
        (placing,) = read_placings(tmp_path / "record")
        assert (placing.worker, placing.model, placing.why) == ("w", "adder", command.why)
        record.close()

    def test_a_loading_model_is_not_commanded_again(self, lanes: Lanes) -> None:
        lanes.host("adder", "subtractor", devices=2)
        worker = lanes.warm()
        lanes.warm("v", device=1)
        leader = Leader(lanes)
        leader.queue.want("adder")

        leader.run_once()
        leader.run_once()
        (commanded,) = leader.commands()
        lanes.show(commanded[0], state="loading", model="adder", device=int(commanded[0] != worker))
        leader.run_once()

        assert leader.commands() == [commanded]

    def test_a_worker_without_a_lease_does_not_count(self, lanes: Lanes) -> None:
        lanes.host("adder")
        gone, stays = lanes.warm("v"), lanes.warm("w")
        lanes.connection.zadd(lanes.keys.leases, {gone: 0})
        leader = Leader(lanes)
        leader.queue.want("adder")

        leader.run_once()

        assert leader.commands() == [(stays, "adder")]

    def test_recent_work_delays_giving_way(self, lanes: Lanes) -> None:
        """Given two idle workers, I expect the last used one to keep its model."""
        lanes.host("adder", "subtractor", "sim", devices=2)
        early, late = lanes.warm("v"), lanes.warm("w", device=1)
        lanes.show(early, state="ready", model="sim", since_ms=1)
        lanes.show(late, state="ready", model="sim", since_ms=2, device=1)
        lanes.connection.xadd(lanes.keys.lane(early), {"id": "q"})
        leader = Leader(lanes)
        leader.run_once()
        lanes.connection.delete(lanes.keys.lane(early))

        leader.queue.want("adder")
        leader.run_once()

        assert leader.commands() == [(late, "adder")]

    def test_a_former_leader_commands_nothing(self, lanes: Lanes) -> None:
        lanes.host("adder")
        lanes.warm()
        leader = Leader(lanes)
        leader.queue.want("adder")
        lanes.connection.set(lanes.keys.leader, "99:thief")

        with pytest.raises(LostLeadership):
            leader.run_once()

        assert leader.commands() == []

    def test_requests_for_a_hopeless_model_are_refused(self, lanes: Lanes) -> None:
        now_ms = lanes.connection.time()[0] * 1000
        lanes.host("adder", fault="no such file", faults=3, faulted_ms=now_ms)
        lanes.warm()
        leader = Leader(lanes)
        leader.queue.want("adder")

        leader.run_once()

        reason = "it could not be loaded, 3 times in a row on host: no such file"
        assert leader.queue.failed == [("adder", reason)]
        assert leader.commands() == []

    @pytest.mark.parametrize(
        ("swap_s", "values"),
        [(0.0, {"max_model_wait_s": 7.0}), (1.4, {"max_swap_share": 0.2}), (0.7, {})],
    )
    def test_settings_or_the_cost_of_swaps_decide_how_long_a_model_waits(
        self, lanes: Lanes, swap_s: float, values: dict[str, float]
    ) -> None:
        lanes.host("subtractor", "adder", swap_s=swap_s)
        worker = lanes.warm()
        lanes.show(worker, state="ready", model="subtractor")
        lanes.connection.xadd(lanes.keys.lane(worker), {"id": "q"})
        leader = Leader(lanes, **values)
        leader.queue.want("adder", wait_s=6.0)
        leader.run_once()
        assert leader.commands() == []

        leader.queue.want("adder", wait_s=8.0)
        leader.run_once()

        assert leader.commands() == [(worker, "adder")]


class TestWhenNothingIsPlaced:
    def test_a_static_yard_loads_nothing(self, lanes: Lanes) -> None:
        lanes.host("adder")
        lanes.warm()
        leader = Leader(lanes, static=True)
        leader.queue.want("adder", wait_s=99)

        leader.run_once()

        assert leader.commands() == []
        assert leader.queue.asked == 0

    def test_without_hosts_nothing_is_decided(self, lanes: Lanes) -> None:
        lanes.worker()
        leader = Leader(lanes)
        leader.queue.want("adder", wait_s=99)

        leader.run_once()

        assert leader.queue.asked == 0
        assert leader.placer.patience_s == float("inf")


class TestHowOften:
    @pytest.fixture(params=[3_600.0])
    def pause_s(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placer, "PAUSE_S", request.param)
        monkeypatch.setattr(placer, "REST", 0)

    @pytest.fixture
    def leader(self, lanes: Lanes, pause_s: None) -> Leader:
        """One that has just decided; a growing queue of `sim` would get one more worker."""
        lanes.host("adder", "sim", devices=2)
        lanes.warm()
        ready = lanes.warm("v", device=1)
        lanes.show(ready, state="ready", model="sim", device=1)
        leader = Leader(lanes)
        leader.run_once()
        assert leader.placer.patience_s == float("inf")
        leader.queue.want("sim", 5_000)
        return leader

    def test_a_growing_queue_waits_for_the_end_of_the_pause(self, leader: Leader) -> None:
        leader.run_once(refresh=False)

        assert leader.commands() == []
        assert leader.placer.patience_s == placer.PAUSE_S

    @pytest.mark.parametrize("pause_s", [0.0], indirect=True)
    def test_a_growing_queue_is_decided_at_the_end_of_the_pause(self, leader: Leader) -> None:
        leader.run_once(refresh=False)

        assert len(leader.commands()) == 1

    @pytest.mark.parametrize("pause_s", [0.0], indirect=True)
    def test_a_slow_decision_has_a_long_pause(
        self, leader: Leader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Given slow decisions over many workers, I expect pauses in proportion."""
        monkeypatch.setattr(placer, "REST", 1e9)
        leader.queue.waiting.clear()
        leader.run_once()
        leader.queue.want("sim", 5_000)

        leader.run_once(refresh=False)

        assert leader.commands() == []

    def test_a_changed_roster_is_decided_immediately(self, leader: Leader) -> None:
        leader.run_once()

        assert len(leader.commands()) == 1

    def test_a_model_without_workers_is_decided_immediately(self, leader: Leader) -> None:
        leader.queue.want("adder")

        leader.run_once(refresh=False)

        assert [model for _, model in leader.commands()] == ["adder"]


class TestTakeover:
    def test_a_new_leader_sees_loading_models(self, lanes: Lanes) -> None:
        lanes.host("adder", devices=2)
        worker = lanes.warm()
        leader = Leader(lanes)
        leader.queue.want("adder")
        leader.run_once()
        lanes.show(worker, state="loading", model="adder")
        lanes.warm("v", device=1)

        lanes.scripts.resign(leader.token)
        successor = Leader(lanes)
        successor.queue.want("adder")
        successor.run_once()

        assert leader.commands() == [(worker, "adder")]

    def test_a_new_leader_repeats_commands_without_effect(self, lanes: Lanes) -> None:
        """A load is idempotent, so that is no harm."""
        lanes.host("adder")
        worker = lanes.warm()
        leader = Leader(lanes)
        leader.queue.want("adder")
        leader.run_once()

        lanes.scripts.resign(leader.token)
        leader.token = lanes.scripts.lead("leader", LONG_MS)
        leader.run_once()

        assert leader.commands() == [(worker, "adder")] * 2


class TestWholeCoordinator:
    def test_requests_go_where_their_model_was_loaded(self, lanes: Lanes, tmp_path: Path) -> None:
        # Given a warm worker, and a request for a model without a worker
        lanes.host("adder", "subtractor")
        worker = lanes.warm()
        lanes.coordinator(record=tmp_path / "record")
        lanes.push([make_request("q1", model="adder")])

        # I expect it to be commanded once to load the model,
        (command,) = eventually(lanes.commands)
        assert (command.worker, command.model) == (worker, "adder")

        # which is recorded beside the dispatches, and then to get the request.
        lanes.show(worker, state="loading", model="adder")
        lanes.show(worker, state="ready", model="adder")
        assert lanes.wait_for_load(worker, 1) == ["q1"]
        assert len(lanes.commands()) == 1
        (placing,) = read_placings(tmp_path / "record")
        assert (placing.place, placing.worker, placing.model) == ("load", "w", "adder")
        assert placing.why == command.why
