"""Schedules: written, read, compared, looked up."""

from __future__ import annotations

from pathlib import Path

from coordinator.schedule import (
    Decision,
    Replay,
    ScheduleWriter,
    first_difference,
    read_schedule,
)


def write(path: Path, *decisions: tuple[str, str]) -> Path:
    writer = ScheduleWriter(path)
    for request_id, worker in decisions:
        writer.write("anon", request_id, worker)
    writer.close()
    writer.close()
    return path


def test_written_and_read(tmp_path: Path) -> None:
    path = write(tmp_path / "one", ("q1", "a"), ("q2", "b"))

    assert list(read_schedule(path)) == [
        Decision(0, "anon", "q1", "a"),
        Decision(1, "anon", "q2", "b"),
    ]


def test_each_decision_is_on_disk_at_once(tmp_path: Path) -> None:
    writer = ScheduleWriter(tmp_path / "one")
    assert not (tmp_path / "one").exists()

    writer.write("anon", "q1", "a")

    assert len(list(read_schedule(tmp_path / "one"))) == 1
    writer.close()


def test_equal_schedules(tmp_path: Path) -> None:
    one = write(tmp_path / "one", ("q1", "a"), ("q2", "b"))
    two = write(tmp_path / "two", ("q1", "a"), ("q2", "b"))

    assert first_difference(one, two) is None


def test_first_difference_in_words(tmp_path: Path) -> None:
    one = write(tmp_path / "one", ("q1", "a"), ("q2", "b"), ("q3", "a"))
    two = write(tmp_path / "two", ("q1", "a"), ("q2", "c"), ("q3", "b"))

    assert first_difference(one, two) == "decision 1: anon/q2 to b, anon/q2 to c"


def test_different_lengths(tmp_path: Path) -> None:
    one = write(tmp_path / "one", ("q1", "a"), ("q2", "b"))
    two = write(tmp_path / "two", ("q1", "a"))

    assert first_difference(one, two) == "2 decisions here, 1 there"


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
