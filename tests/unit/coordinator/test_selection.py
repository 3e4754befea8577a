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
from coordinator.routing.selection import Decision, Placing, ScheduleWriter, Selection
from tests.support.schedules import read_decisions, read_placings
from tokenyard.protocol.control import Command
from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.settings import CoordinatorSettings


def lanes(names: str = "abc", model: str = "sim", load: int = 0) -> Lanes:
    return Lanes(Lane(f"{name}.1", name, model, load, 4) for name in names)


def queued(at: int, intake: IntakeClass = "normal") -> QueuedRequest:
    return QueuedRequest(intake=intake, entry=f"{at}-0", id=f"{intake}{at}")


def selection(**values: Any) -> Selection:
    return Selection(CoordinatorSettings(redis_url="redis://x", **values))


def give(chosen: Selection, requests: Sequence[QueuedRequest], open_lanes: Lanes) -> str:
    """Names of the workers of the requests; ``-`` for one that has to wait."""
    names = ""
    for request in requests:
        pick = chosen.choose(request, open_lanes)
        if pick:
            chosen.settle(request, pick.lane)
        names += pick.lane.name if pick else "-"
    return names


def test_round_robin_has_a_turn_for_each_model() -> None:
    chosen = selection()

    assert give(chosen, [queued(n) for n in range(4)], lanes("abc", "adder")) == "abca"
    assert give(chosen, [queued(n) for n in range(2)], lanes("abc", "subtractor")) == "ab"


class TestDeterministic:
    @pytest.fixture
    def chosen(self) -> Selection:
        """Begun with three workers, and two of another model."""
        begun = selection(deterministic=True, expect_workers=3)
        begun.start_when_complete([*lanes(), *lanes("de", "other")])
        return begun

    def test_a_request_waits_for_its_worker(self, chosen: Selection) -> None:
        # Given the second of three workers full
        full = Lanes(replace(lane, load=4) if lane.name == "b" else lane for lane in lanes())

        # I expect its request to wait, the others to have theirs, and the turn to be kept.
        assert give(chosen, [queued(n) for n in range(3)], full) == "a-c"
        assert give(chosen, [queued(1)], lanes()) == "b"

    def test_workers_that_come_and_go_change_no_turn(self, chosen: Selection) -> None:
        assert give(chosen, [queued(n) for n in range(3)], lanes("ac")) == "a-c"
        assert give(chosen, [queued(n) for n in range(3, 6)], lanes("abcd")) == "abc"

    def test_classes_and_models_have_turns_of_their_own(self, chosen: Selection) -> None:
        assert give(chosen, [queued(0), queued(1)], lanes()) == "ab"
        assert give(chosen, [queued(0, "high")], lanes()) == "a"
        assert give(chosen, [queued(9)], lanes("de", "other")) == "d"
        assert give(chosen, [queued(2)], lanes()) == "c"

    def test_an_absent_worker_is_logged_once_and_when_it_is_back(
        self, chosen: Selection, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        assert give(chosen, [queued(n) for n in range(3)], lanes("ac")) == "a-c"
        assert give(chosen, [queued(1)], lanes("ac")) == "-"
        assert caplog.messages == [
            "no worker b serves sim: its requests, and those behind them, wait for it"
        ]
        assert give(chosen, [queued(1)], lanes("abc")) == "b"
        assert caplog.messages[1:] == ["worker b serves sim again"]

    def test_a_full_worker_is_not_absent(
        self, chosen: Selection, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert give(chosen, [queued(0)], lanes(load=4)) == "-"
        assert caplog.messages == []


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

    assert [decision.id for decision in read_decisions(tmp_path / "record")] == ["normal1"]


def place(writer: ScheduleWriter, model: str, *devices: int) -> None:
    command = Command(verb="load", worker="a.1", model=model, devices=[*devices], why="it waits")
    writer.write_placing(command, "a")


def test_commands_to_load_models_are_recorded_between_requests(tmp_path: Path) -> None:
    writer = ScheduleWriter(tmp_path / "one")
    place(writer, "adder")
    writer.write("anon", "q1", "a")
    place(writer, "large", 0, 1)
    writer.write("anon", "q2", "b")
    writer.close()
    writer.close()

    assert read_decisions(tmp_path / "one") == [
        Decision(0, "anon", "q1", "a"),
        Decision(1, "anon", "q2", "b"),
    ]
    assert read_placings(tmp_path / "one") == [
        Placing(0, "load", "a", "adder", "it waits"),
        Placing(1, "load", "a", "large", "it waits", [0, 1]),
    ]
    first, second, *_ = (tmp_path / "one").read_bytes().splitlines()
    assert first == b'{"n":0,"place":"load","worker":"a","model":"adder","why":"it waits"}'
    assert second == b'{"n":0,"client":"anon","id":"q1","worker":"a"}'
