"""Batch jobs that no worker will run: each place where somebody looks says so."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.batch.conftest import RqYard, WriteLines, completion
from tests.support.servers import Server
from tokenyard.batch import submit_batch
from tokenyard.batch.rq.jobs import JobOrder
from tokenyard.batch.rq.worker import BatchWorker
from tokenyard.batch.state import BatchSpec
from tokenyard.doctor import diagnose
from tokenyard.doctor.evidence import gather
from tokenyard.process.program import Exit
from tokenyard.protocol.errors import WaitTimeout
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.telemetry.queues import BatchService, read_batch_service


class Alone(RqYard):
    """A queue without a worker."""

    def born(self) -> BatchWorker:
        """A worker that has registered."""
        made = self.worker()
        made.register_birth()
        return made

    def service(self) -> BatchService:
        return read_batch_service(self.connection, self.yard)


@pytest.fixture
def alone(valkey_broker: Server, worker_context: None) -> Alone:
    return Alone(valkey_broker.url)


def test_jobs_that_could_run_and_living_workers_are_counted(alone: Alone) -> None:
    order = JobOrder(spec=BatchSpec(input="/in", output="/out"))
    now = datetime.datetime.now(datetime.UTC)
    for at in (None, now - datetime.timedelta(minutes=1), now + datetime.timedelta(hours=1)):
        alone.queue.enqueue(order, at=at)
    assert alone.service() == BatchService(waiting=2, workers=0)
    assert alone.service().is_missing
    killed = alone.born()
    alone.born()
    alone.connection.delete(killed.key)  # as it expires
    assert alone.service() == BatchService(waiting=2, workers=1)


def test_submit_and_status_say_that_no_worker_is_there(
    alone: Alone, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    done = alone.call("submit", source, "-o", tmp_path / "out.jsonl")
    assert done.exit_code == 0
    assert "No batch worker is there" in done.stderr
    job = done.stdout.strip()
    why = "a batch worker, and none is there: start `tokenyard batch worker`"
    assert json.loads(alone.call("status", job, "--json").stdout)["waits_for"] == why
    assert "none is there" in alone.call("status", job).stdout
    waited = alone.call("status", job, "--wait", "--timeout", 0.001)
    assert (waited.exit_code, f"{job} waits for {why}\n") == (Exit.TIMEOUT, waited.stderr)
    # If one is there, I expect the job to wait for its turn.
    alone.born()
    behind = alone.call("submit", source, "-o", tmp_path / "other.jsonl")
    assert behind.stderr == ""
    after = alone.call("submit", source, "-o", tmp_path / "third.jsonl", "--after", job)
    assert _waits_for(alone, behind) == "a batch worker, behind 1 job"
    assert _waits_for(alone, after) == f"the end of {job}"
    late = alone.call("submit", source, "-o", tmp_path / "late.jsonl", "--at", "2126-11-22T02:00")
    assert _waits_for(alone, late).startswith("its time, 2126-11-22 02:00:00")


def _waits_for(alone: Alone, submitted: Result) -> str:
    status = alone.call("status", submitted.stdout.strip(), "--json")
    waits_for: str = json.loads(status.stdout)["waits_for"]
    return waits_for


def test_a_script_that_waits_in_vain_learns_for_what(
    alone: Alone, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    job = submit_batch(source, tmp_path / "out", redis_url=alone.url, yard=alone.yard)
    assert not job.has_worker
    with pytest.raises(WaitTimeout, match="it waits for a batch worker, and none is there"):
        job.wait(timeout_s=0)


@pytest.mark.parametrize(
    ("prepare", "verdicts"),
    [
        (lambda _: None, []),
        (lambda alone: alone.born(), ["ok"]),
        (lambda alone: alone.enqueue(), ["fault"]),
    ],
    ids=["unused", "a worker", "a job"],
)
def test_the_doctor_finds_jobs_without_a_worker(
    alone: Alone, prepare: Callable[[Alone], object], verdicts: list[str]
) -> None:
    prepare(alone)
    evidence = gather(Yard(alone.connection, Keys(alone.yard), alone.url))
    assert [one.verdict for one in diagnose(evidence) if one.name == "batches"] == verdicts
