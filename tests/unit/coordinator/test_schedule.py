"""Schedules: written, read, compared, looked up."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.routing.schedule import (
    Decision,
    Placing,
    Replay,
    ScheduleWriter,
    first_difference,
    read_placings,
    read_schedule,
)
from tokenyard.protocol.commands import Command


def write(path: Path, *decisions: tuple[str, str]) -> Path:
    writer = ScheduleWriter(path)
    for request_id, worker in decisions:
        writer.write("anon", request_id, worker)
    writer.close()
    writer.close()
    return path


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "one", ("q1", "a"), ("q2", "b"))

    assert list(read_schedule(path)) == [
        Decision(0, "anon", "q1", "a"),
        Decision(1, "anon", "q2", "b"),
    ]


def place(writer: ScheduleWriter, model: str, *devices: int) -> None:
    command = Command(verb="load", worker="a.1", model=model, devices=[*devices], why="it waits")
    writer.write_placing(command, "a")


def test_commands_to_load_models_are_recorded_between_requests(tmp_path: Path) -> None:
    writer = ScheduleWriter(tmp_path / "one")
    place(writer, "adder")
    writer.write("anon", "q1", "a")
    place(writer, "large", 0, 1)
    writer.close()

    assert list(read_schedule(tmp_path / "one")) == [Decision(0, "anon", "q1", "a")]
    assert list(read_placings(tmp_path / "one")) == [
        Placing(0, "load", "a", "adder", "it waits"),
        Placing(1, "load", "a", "large", "it waits", [0, 1]),
    ]
    first = (tmp_path / "one").read_bytes().splitlines()[0]
    assert first == b'{"n":0,"place":"load","worker":"a","model":"adder","why":"it waits"}'


def test_schedules_are_compared_without_commands_to_load_models(tmp_path: Path) -> None:
    """Given the same requests and other swaps, I expect the same schedule, also in a replay."""
    one = write(tmp_path / "one", ("q1", "a"), ("q2", "b"))
    writer = ScheduleWriter(tmp_path / "two")
    writer.write("anon", "q1", "a")
    place(writer, "adder")
    writer.write("anon", "q2", "b")
    writer.close()

    assert first_difference(one, tmp_path / "two") is None
    assert Replay(read_schedule(tmp_path / "two")).worker("anon", "q2") == "b"


def test_each_decision_is_flushed_immediately(tmp_path: Path) -> None:
    writer = ScheduleWriter(tmp_path / "one")
    assert not (tmp_path / "one").exists()

    writer.write("anon", "q1", "a")

    assert len(list(read_schedule(tmp_path / "one"))) == 1
    writer.close()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ("abc", None),
        ("acb", "decision 1: anon/q1 to b, anon/q1 to c"),
        ("ab", "3 decisions here, 2 there"),
    ],
)
def test_the_first_difference_of_two_schedules(
    tmp_path: Path, other: str, difference: str | None
) -> None:
    one, two = (
        write(tmp_path / f"{at}", *((f"q{n}", worker) for n, worker in enumerate(workers)))
        for at, workers in enumerate(("abc", other))
    )

    assert first_difference(one, two) == difference


def test_replay_knows_each_attempt() -> None:
    decisions = [
        Decision(0, "anon", "q1", "a"),
        Decision(1, "other", "q1", "b"),
        Decision(2, "anon", "q1", "c"),
    ]
    replay = Replay(iter(decisions))

    assert replay.worker("anon", "q1") == "a"
    replay.advance("anon", "q1")
    assert replay.worker("anon", "q1") == "c"
    replay.advance("anon", "q1")
    assert replay.worker("anon", "q1") == "c", "more attempts than were recorded"
    assert replay.worker("other", "q1") == "b"
    assert replay.worker("anon", "unknown") is None
    replay.advance("anon", "unknown")
