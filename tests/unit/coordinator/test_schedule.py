"""Schedules: what is recorded, and when."""

from __future__ import annotations

from pathlib import Path

from coordinator.routing.selection import Decision, Placing, ScheduleWriter
from tests.support.schedules import read_decisions, read_placings
from tokenyard.protocol.control import Command


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


def test_each_decision_is_flushed_immediately(tmp_path: Path) -> None:
    writer = ScheduleWriter(tmp_path / "one")
    assert not (tmp_path / "one").exists()

    writer.write("anon", "q1", "a")

    assert len(read_decisions(tmp_path / "one")) == 1
    writer.close()
