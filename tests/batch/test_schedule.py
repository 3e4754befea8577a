"""When scheduled jobs are due, where the clocks are changed."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator

import pytest

from tests.support.builders import random_name
from tests.support.fake_clock import FakeClock
from tests.support.servers import Server
from tokenyard.batch.rq import work
from tokenyard.batch.rq.jobs import BatchQueue, JobOrder
from tokenyard.batch.rq.schedule import first_spec, next_time, read_time
from tokenyard.batch.rq.work import WorkerContext
from tokenyard.batch.state import BatchSpec
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.errors import SettingsError

#: Berlin's rules, without its name, which needs a database of zones.
BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", BERLIN)
        time.tzset()
        yield
    time.tzset()


def at(text: str) -> datetime.datetime:
    """A time, by its offset from UTC."""
    return datetime.datetime.fromisoformat(text)


def set_to(clock: FakeClock, now: str) -> None:
    clock.step(at(now).timestamp() - clock.wall())


@pytest.mark.parametrize(
    ("cron", "after", "due"),
    [
        ("0 9 * * *", "2026-10-24T09:00:00+02:00", "2026-10-25T09:00:00+01:00"),
        ("0 9 * * *", "2026-03-28T09:00:00+01:00", "2026-03-29T09:00:00+02:00"),
        ("30 2 * * *", "2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"),
        ("30 2 * * *", "2026-10-25T02:05:00+01:00", "2026-10-26T02:30:00+01:00"),
        ("30 2 * * *", "2026-03-28T02:30:00+01:00", "2026-03-29T03:30:00+02:00"),
    ],
    ids=["back", "forward", "shown-twice", "shown-again", "never-shown"],
)
def test_a_schedule_goes_by_the_clock_on_the_wall(cron: str, after: str, due: str) -> None:
    assert next_time(cron, at(after)) == at(due)


@pytest.mark.parametrize(
    "cron",
    ["0 9 * * *", "*/10 * * * *", "0,30 1-3 * * *", "15 2 * * *"],
)
@pytest.mark.parametrize("begin", ["2026-10-24T12:00:00+02:00", "2026-03-28T12:00:00+01:00"])
def test_no_two_jobs_of_a_schedule_have_one_name(cron: str, begin: str) -> None:
    due, names = at(begin), []
    while due < at(begin) + datetime.timedelta(days=3):
        before, due = due, next_time(cron, due)
        assert due > before
        names.append(f"{due.astimezone():%Y-%m-%d-%H%M}")
    assert len(set(names)) == len(names)


def test_a_time_of_day_is_one_of_the_zone(fake_clock: FakeClock) -> None:
    # Given the evening before the clocks go back
    set_to(fake_clock, "2026-10-24T12:00:00+02:00")
    assert read_time("09:00") == at("2026-10-25T09:00:00+01:00")
    assert read_time("13:00") == at("2026-10-24T13:00:00+02:00")
    # In the hour that is shown twice, I expect the next of both.
    set_to(fake_clock, "2026-10-25T02:45:00+02:00")
    assert read_time("02:30") == at("2026-10-25T02:30:00+01:00")
    set_to(fake_clock, "2026-10-25T02:45:00+01:00")
    assert read_time("02:30") == at("2026-10-26T02:30:00+01:00")


@pytest.mark.parametrize(
    ("cron", "output"),
    [
        ("0 9,21 * * *", "out-%Y-%m-%d.jsonl"),
        ("0 9 * * *", "out-%Y.jsonl"),
        ("0 9 * * *", "out-%H%M.jsonl"),
    ],
)
def test_names_that_would_repeat_are_refused(fake_clock: FakeClock, cron: str, output: str) -> None:
    set_to(fake_clock, "2026-06-01T12:00:00+02:00")
    with pytest.raises(SettingsError, match="give it more of the time"):
        first_spec(BatchSpec(input="in.jsonl", output=output), cron)


def test_the_first_job_of_a_schedule_is_named_by_its_time(fake_clock: FakeClock) -> None:
    set_to(fake_clock, "2026-10-24T12:00:00+02:00")
    spec = BatchSpec(input="in.jsonl", output="out-%Y-%m-%d.jsonl")
    due, first = first_spec(spec, "0 9 * * *")
    assert (due, first.output) == (at("2026-10-25T09:00:00+01:00"), "out-2026-10-25.jsonl")


def test_a_job_that_starts_before_its_time_hands_over_the_next_one(
    valkey_broker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker whose clock is behind the one that handed it a job
    yard = random_name("yard")
    monkeypatch.setattr(WorkerContext, "yard", yard)
    spec = BatchSpec(input="/in", output="/out-%Y-%m-%d")
    due, first = first_spec(spec, "0 9 * * *")
    order = JobOrder(spec=first, cron="0 9 * * *", cron_spec=spec, cron_due=due.timestamp())
    with open_connection(valkey_broker.url) as connection:
        queue = BatchQueue(connection, yard)
        job = queue.enqueue(order, at=due)
        for _ in range(2):
            work._enqueue_next(job, order)
        # I expect one successor, for the day after.
        [name] = set(queue.rq.scheduled_job_registry.get_job_ids()) - {job.id}
        successor = queue.find(name).order
    assert successor.cron_due == next_time("0 9 * * *", due).timestamp()
    assert successor.spec.output != first.output
