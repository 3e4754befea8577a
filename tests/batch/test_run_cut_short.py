"""A batch job that is cancelled or out of time, or that lets others go first."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.batch.conftest import Job, WriteLines, completion, objects
from tests.batch.test_run import counts
from tests.support.processes import Plant
from tests.support.waiting import eventually
from tokenyard.batch import BatchState
from tokenyard.batch.runner import Runner
from tokenyard.batch.state import BatchSpec
from tokenyard.client.sync import Client


class Slow:
    """A job on a yard without a worker, so that its requests wait."""

    def __init__(self, plant: Plant, spec: BatchSpec) -> None:
        self.plant = plant
        self.is_cancelled = False
        self.state: BatchState | None = None
        runner = Runner(plant.url, plant.keys.yard, spec, is_cancelled=lambda: self.is_cancelled)

        def work() -> None:
            self.state = runner.run()

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def wait_for_requests(self, count: int) -> None:
        """Wait until so many requests are in the intake."""
        low = self.plant.keys.intake("low")
        eventually(lambda: self.plant.connection.xlen(low) >= count)

    def ended(self) -> BatchState:
        self.thread.join(60.0)
        assert self.state is not None
        return self.state


@pytest.fixture
def idle_plant(valkey_broker: Any) -> Any:
    """A yard with a coordinator and no worker."""
    with Plant(valkey_broker.url) as plant:
        plant.coordinator()
        plant.wait_for_leader()
        yield plant


@pytest.fixture
def job(idle_plant: Plant, write_lines: WriteLines, tmp_path: Path) -> Job:
    """A job on that yard."""
    return Job(idle_plant, write_lines, tmp_path / "out.jsonl")


@pytest.mark.long
def test_a_cancelled_job_answers_every_line_and_can_be_resumed(idle_plant: Plant, job: Job) -> None:
    # Given a job whose requests wait
    lines = [completion(number) for number in range(50)]
    slow = Slow(idle_plant, job.spec(lines, window=10))
    slow.wait_for_requests(10)
    # If it is cancelled
    slow.is_cancelled = True
    state = slow.ended()
    # I expect an error for each line, and no request left in the yard.
    assert (state.status, counts(state)) == ("cancelled", (50, 0, 50))
    found = objects(job.errors)
    assert {line["error"]["code"] for line in found} == {"batch_cancelled"}
    assert {line["custom_id"] for line in found} == {line["custom_id"] for line in lines}
    # If it runs again with a worker, I expect results for all.
    idle_plant.worker()
    again = job.run(window=10)
    assert (again.id, again.status, counts(again)) == (state.id, "completed", (50, 50, 0))
    assert objects(job.errors) == []


def test_a_completion_window_ends_the_job(idle_plant: Plant, job: Job) -> None:
    lines = [completion(number) for number in range(20)]
    spec = job.spec(lines, window=5, completion_window_s=1.0)
    state = Runner(idle_plant.url, idle_plant.keys.yard, spec).run()
    assert (state.status, counts(state)) == ("expired", (20, 0, 20))
    assert {line["error"]["code"] for line in objects(job.errors)} == {"batch_expired"}


def test_interactive_requests_overtake_a_batch(idle_plant: Plant, job: Job) -> None:
    # Given a waiting job, and a later request
    slow = Slow(idle_plant, job.spec([completion(number) for number in range(10)]))
    slow.wait_for_requests(10)
    with Client(idle_plant.url, idle_plant.keys.yard) as client:
        handle = client.submit("me first")
        assert handle.position == 0
        idle_plant.worker()
        handle.result(timeout=60.0)
    assert slow.ended().status == "completed"
