"""Jobs of RQ that a worker took off the queue and did not begin."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rq.exceptions import StopRequested
from rq.job import Job, JobStatus

from tests.batch.conftest import ENDS_S, BatchYard, RqYard, completion, objects
from tests.batch.interrupted import Moment
from tests.batch.running import wait_for_waiting_workers
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.batch.rq import taken
from tokenyard.batch.rq.jobs import JobOrder
from tokenyard.batch.rq.taken import WorkerQueue
from tokenyard.batch.state import BatchSpec


class Queues(RqYard):
    """A queue with one job, as who submits it and as a worker has it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.worked = WorkerQueue(self.queue.rq.name, self.connection)
        self.worked.serializer = self.queue.rq.serializer
        spec = BatchSpec(input="/in", output="/out", errors="/errors")
        self.job = self.queue.enqueue(JobOrder(spec=spec, retries=0))

    def take(self) -> None:
        """Do what the broker does for a worker."""
        assert self.connection.lmove(self.worked.key, self.worked.intermediate_queue_key)

    def look(self) -> None:
        """Do what a worker does between two waits."""
        self.worked.intermediate_queue.cleanup(None, self.worked)  # type: ignore[arg-type]

    @property
    def waiting(self) -> list[str]:
        return self.worked.get_job_ids()

    @property
    def taken(self) -> list[str]:
        return self.worked.intermediate_queue.get_job_ids()


@pytest.fixture
def queues(valkey_broker: Server) -> Queues:
    return Queues(valkey_broker.url)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken, "GRACE_S", 0.0)


def test_a_job_that_nobody_began_waits_again_before_all_others(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues.take()
    later = queues.enqueue()
    # If it was seen a moment ago
    queues.look()
    queues.look()
    # I expect nothing: its worker may be about to begin it.
    assert (queues.waiting, queues.taken) == ([later.id], [queues.job.id])
    # After its time
    monkeypatch.setattr(taken, "GRACE_S", 0.0)
    queues.look()
    # it is in the queue once, and no try is counted, although it has a single one.
    queues.look()
    assert (queues.waiting, queues.taken) == ([queues.job.id, later.id], [])
    assert queues.job.get_status() is JobStatus.QUEUED


def _finish(queues: Queues) -> None:
    queues.job.set_status(JobStatus.FINISHED)


def _requeue(queues: Queues) -> None:
    queues.worked.push_job_id(queues.job.id)


def _delete(queues: Queues) -> None:
    queues.connection.delete(queues.job.key)


def _spoil(queues: Queues) -> None:
    queues.connection.hset(queues.job.key, "created_at", "broken")


@pytest.mark.parametrize(
    ("change", "waits"),
    [(_finish, False), (_requeue, True), (_delete, False), (_spoil, False)],
    ids=["is over", "waits again", "deleted", "unreadable"],
)
def test_what_an_earlier_try_left_is_removed(
    queues: Queues, no_grace: None, change: Callable[[Queues], None], waits: bool
) -> None:
    queues.take()
    change(queues)

    queues.look()

    assert (queues.waiting, queues.taken) == ([queues.job.id] * waits, [])


def test_a_job_that_has_begun_stays(queues: Queues, no_grace: None) -> None:
    queues.take()
    registry = queues.worked.started_job_registry
    queues.connection.zadd(registry.key, {f"{queues.job.id}:{'0' * 32}": 2**40})

    queues.look()

    assert (queues.waiting, queues.taken) == ([], [queues.job.id])


def test_a_job_that_comes_while_a_worker_stops_waits_again(
    queues: Queues, worker_context: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    # Given a worker that is stopped at the moment when it gets a job
    worker = queues.worker()
    get = WorkerQueue.lmove

    def stop(*arguments: Any) -> Any:
        taken = get(*arguments)
        worker.request_stop(signal.SIGTERM, None)
        return taken

    monkeypatch.setattr(WorkerQueue, "lmove", stop)
    # If it waits, I expect it to stop and the job to wait for another, as if it had not been taken.
    with pytest.raises(StopRequested):
        worker.dequeue_job_and_maintain_ttl(1)
    assert (queues.waiting, queues.taken) == ([queues.job.id], [])


@pytest.mark.long
def test_the_job_of_a_paused_worker_is_run_by_another(yard: BatchYard, tmp_path: Path) -> None:
    target = yard.folder / "out.jsonl"
    # Given a job that was handed to a worker which cannot take it
    paused = yard.work(program=("tests.batch.interrupted", Moment.TAKEN))
    job = yard.submit(yard.write("in.jsonl", [completion(1)]), "-o", target)
    eventually(lambda: yard.queue.rq.intermediate_queue.get_job_ids() == [job])
    # If there is another worker
    yard.work()
    # I expect it to run the job, as its first try: RQ alone would have counted one,
    found = yard.queue.find(job)
    eventually(lambda: found.get_status() is JobStatus.FINISHED)
    assert yard.seen(job)["retries_left"] == 5
    # and the first to let go of it.
    os.kill(paused.pid, signal.SIGCONT)
    log = tmp_path / "worker-0.log"
    eventually(lambda: f"job {job}: another worker has it" in log.read_text())
    assert len(objects(target)) == 1


@pytest.mark.long
def test_a_worker_that_is_stopped_takes_no_job(yard: BatchYard) -> None:
    # Given a worker whose scheduler takes its time to end
    worker = yard.work()
    wait_for_waiting_workers(yard.plant.connection, 1)
    [scheduler] = psutil.Process(worker.pid).children()
    scheduler.suspend()
    # If the worker is stopped
    worker.terminate()
    wait_for_waiting_workers(yard.plant.connection, 0)
    job = yard.job([completion(1)])
    # I expect the job to wait for another.
    assert worker.poll() is None
    scheduler.resume()
    assert worker.wait(ENDS_S) == 0
    assert "takes job" not in yard.log
    assert yard.queue.rq.get_job_ids() == [job]
    assert Job.exists(job, yard.plant.connection)
