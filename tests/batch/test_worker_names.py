"""Batch workers that are started under a name which another one has."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rq import Worker
from rq.job import JobStatus

from tests.batch.conftest import RqYard
from tests.support.builders import random_name
from tests.support.fake_clock import FakeClock
from tests.support.servers import Server
from tokenyard.batch.rq.worker import BatchWorker
from tokenyard.protocol.errors import SettingsError


class Names(RqYard):
    """Workers of one yard, all named alike."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.name = random_name("worker")

    def make(self) -> BatchWorker:
        return self.worker(self.name)

    def born(self, *, hostname: str = "", pid: int = 0) -> BatchWorker:
        """A worker that has been started, here or elsewhere."""
        worker = self.make()
        worker.hostname, worker.pid = hostname or worker.hostname, pid or worker.pid
        worker.register_birth()
        return worker

    def present(self) -> tuple[str, int]:
        """Host and process of the worker that has the name."""
        found = Worker.find_by_key(f"rq:worker:{self.name}", self.connection)
        assert found is not None
        return str(found.hostname), int(found.pid or 0)


@pytest.fixture
def names(valkey_broker: Server, worker_context: None) -> Names:
    return Names(valkey_broker.url)


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_the_name_of_a_dead_worker_and_its_job_are_taken_over(names: Names, dead_pid: int) -> None:
    # Given a worker that was killed amid a job
    killed = names.born(pid=dead_pid)
    job = names.enqueue()
    taken = killed.dequeue_job_and_maintain_ttl(1)
    assert taken is not None
    killed.prepare_execution(taken[0])
    killed.prepare_job_execution(taken[0], remove_from_intermediate_queue=True)
    # If another is started under its name
    second = names.born()
    second.clean_registries()
    # I expect it to have the name, and the job to wait again.
    assert names.present() == (second.hostname, second.pid)
    assert names.queue.find(job.id).get_status() == JobStatus.QUEUED


def test_the_name_of_a_silent_worker_of_another_host_is_taken_over(
    names: Names, fake_clock: FakeClock
) -> None:
    names.born(hostname="elsewhere", pid=7)
    before = fake_clock.now
    second = names.born()
    assert names.present() == (second.hostname, second.pid)
    assert fake_clock.now - before > 60


def test_the_name_of_a_worker_that_lives_is_refused(
    names: Names, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = names.born(hostname="elsewhere", pid=7)
    named = BatchWorker._named

    def beating(worker: BatchWorker, name: str) -> object:
        other.heartbeat()
        return named(worker, name)

    monkeypatch.setattr(BatchWorker, "_named", beating)  # each look finds a new sign of life
    with pytest.raises(SettingsError, match=r"process 7 of host elsewhere .* give another --name"):
        names.born()
    assert names.present() == ("elsewhere", 7)


def test_a_worker_that_ended_leaves_its_name(names: Names) -> None:
    names.born(hostname="elsewhere").register_death()  # type: ignore[no-untyped-call]
    second = names.born()
    assert names.present() == (second.hostname, second.pid)
