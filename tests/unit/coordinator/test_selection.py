"""The policy in force, its turns and its record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import Lane
from coordinator.routing.queued_request import QueuedRequest
from coordinator.routing.schedule import ScheduleWriter, read_schedule
from coordinator.routing.selection import Selection
from tests.support.fake_clock import FakeClock
from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.settings import CoordinatorSettings


def lanes(names: str = "abc", model: str = "sim", load: int = 0) -> Lanes:
    return Lanes(Lane(f"{name}.1", name, model, load, 4) for name in names)


def queued(at: int, intake: IntakeClass = "normal") -> QueuedRequest:
    return QueuedRequest(intake=intake, entry=f"{at}-0", id=f"{intake}{at}")


def selection(**values: Any) -> Selection:
    if values.get("deterministic"):
        values.setdefault("expect_workers", 3)
    chosen = Selection(CoordinatorSettings(redis_url="redis://x", **values))
    chosen.start()
    return chosen


def give(chosen: Selection, requests: Sequence[QueuedRequest], open_lanes: Lanes) -> str:
    """Names of the workers of the requests; ``-`` for one that has to wait."""
    names = ""
    for request in requests:
        pick = chosen.choose(request, open_lanes)
        if pick:
            chosen.settle(request, pick.lane)
        names += pick.lane.name if pick else "-"
    return names


def cca(folder: Path) -> Path:
    """A schedule of three requests."""
    writer = ScheduleWriter(folder / "old")
    for at, worker in enumerate("cca"):
        writer.write("anon", f"normal{at}", worker)
    writer.close()
    return folder / "old"


def test_round_robin_has_a_turn_for_each_model() -> None:
    chosen = selection()

    assert give(chosen, [queued(n) for n in range(4)], lanes("abc", "adder")) == "abca"
    assert give(chosen, [queued(n) for n in range(2)], lanes("abc", "subtractor")) == "ab"


class TestDeterministic:
    def test_a_request_waits_for_its_worker(self) -> None:
        # Given the second of three workers full
        chosen = selection(deterministic=True)
        chosen.start_when_complete(lanes())
        full = Lanes(replace(lane, load=4) if lane.name == "b" else lane for lane in lanes())

        # I expect its request to wait, the others to have theirs, and the turn to be kept.
        assert give(chosen, [queued(n) for n in range(3)], full) == "a-c"
        assert give(chosen, [queued(1)], lanes()) == "b"

    def test_workers_that_come_and_go_change_no_turn(self) -> None:
        chosen = selection(deterministic=True)
        chosen.start_when_complete(lanes("abc"))

        assert give(chosen, [queued(n) for n in range(3)], lanes("ac")) == "a-c"
        assert give(chosen, [queued(n) for n in range(3, 6)], lanes("abcd")) == "abc"

    def test_classes_and_models_have_turns_of_their_own(self) -> None:
        chosen = selection(deterministic=True)
        chosen.start_when_complete([*lanes("abc"), *lanes("de", "other")])

        assert give(chosen, [queued(0), queued(1)], lanes()) == "ab"
        assert give(chosen, [queued(0, "high")], lanes()) == "a"
        assert give(chosen, [queued(9)], lanes("de", "other")) == "d"
        assert give(chosen, [queued(2)], lanes()) == "c"

    def test_a_duplicate_takes_a_turn(self) -> None:
        chosen = selection(deterministic=True)
        chosen.start_when_complete(lanes())
        first, second = (QueuedRequest(intake="normal", entry=f"{n}-0", id="twice") for n in (1, 2))

        assert give(chosen, [first], lanes()) == "a"
        assert chosen.choose(second, lanes())
        chosen.settle(second, None)
        assert give(chosen, [queued(3)], lanes()) == "c"


def test_a_replay_follows_the_schedule(tmp_path: Path) -> None:
    chosen = selection(replay=cca(tmp_path))

    assert give(chosen, [queued(n) for n in range(3)], lanes()) == "cca"
    assert give(chosen, [queued(0)], lanes("ab")) == "-", "its worker is absent"
    assert give(chosen, [queued(n) for n in (7, 8)], lanes()) == "ab", "not in the record"


class TestAbsentWorkers:
    """Given requests that must go to an absent worker."""

    @pytest.fixture(autouse=True)
    def _listen(self, caplog: pytest.LogCaptureFixture, fake_clock: FakeClock) -> None:
        caplog.set_level(logging.INFO)
        self.log = caplog
        self.clock = fake_clock

    def replaying(self, tmp_path: Path) -> Selection:
        """A selection that follows "cca", waits 5 s, and records."""
        return selection(replay=cca(tmp_path), replay_wait_s=5.0, record=tmp_path / "new")

    def test_a_replay_waits_and_logs_it_once(self, tmp_path: Path) -> None:
        chosen = self.replaying(tmp_path)

        assert give(chosen, [queued(0), queued(0), queued(1)], lanes("ab")) == "---"

        (said,) = self.log.messages
        assert said.startswith("no worker c serves sim: its requests, and those behind them, wait")
        assert said.endswith("for at most 5 s")

    def test_a_replay_continues_elsewhere_and_logs_and_records_it(self, tmp_path: Path) -> None:
        chosen = self.replaying(tmp_path)
        assert give(chosen, [queued(0)], lanes("ab")) == "-"
        self.clock.advance(5.0)

        pick = chosen.choose(queued(0), lanes("ab"))
        assert pick.why == "replay: c is absent; round_robin, load 0 of 4"
        chosen.settle(queued(0), pick.lane)
        assert give(chosen, [queued(1), queued(2)], lanes("ab")) == "ba"
        chosen.close()

        assert [line for line in self.log.messages if "elsewhere" in line] == [
            "no worker c serves sim after 5 s: its requests go elsewhere"
        ]
        recorded = [(one.worker, one.instead_of) for one in read_schedule(tmp_path / "new")]
        assert recorded == [("a", "c"), ("b", "c"), ("a", "")]

    def test_a_replay_returns_to_a_worker_that_comes_back(self, tmp_path: Path) -> None:
        chosen = self.replaying(tmp_path)
        chosen.choose(queued(0), lanes("ab"))
        self.clock.advance(5.0)

        assert give(chosen, [queued(0), queued(1)], lanes("abc")) == "cc"
        assert self.log.messages[-1] == "worker c serves sim again"
        chosen.close()

    def test_a_full_worker_is_not_absent(self, tmp_path: Path) -> None:
        chosen = self.replaying(tmp_path)
        full = Lanes(replace(lane, load=4) if lane.name == "c" else lane for lane in lanes())

        assert give(chosen, [queued(0)], full) == "-"
        self.clock.advance(50.0)
        assert give(chosen, [queued(0)], full) == "-"
        assert not self.log.messages

    def test_the_deterministic_mode_waits_forever_and_logs_it(self) -> None:
        chosen = selection(deterministic=True)
        chosen.start_when_complete(lanes("abc"))

        assert give(chosen, [queued(n) for n in range(3)], lanes("ac")) == "a-c"
        self.clock.advance(1e6)
        assert give(chosen, [queued(1)], lanes("ac")) == "-"

        assert self.log.messages == [
            "no worker b serves sim: its requests, and those behind them, wait for it"
        ]


def test_only_carried_out_decisions_are_recorded(tmp_path: Path) -> None:
    chosen = selection(record=tmp_path / "record")
    one, two = queued(1), queued(2)
    pick = chosen.choose(one, lanes())
    assert pick
    chosen.choose(two, lanes())
    chosen.settle(two, None)
    chosen.settle(one, pick.lane)
    chosen.close()
    chosen.close()

    assert [decision.id for decision in read_schedule(tmp_path / "record")] == ["normal1"]
