"""A batch worker that is stopped by SIGTERM at an awkward moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.batch.conftest import ENDS_S, BatchYard, completion
from tests.batch.interrupted import Moment
from tests.batch.running import wait_for_waiting_workers
from tests.cli.running import Command
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.broker.connection import open_connection

PROGRAM = "tests.batch.interrupted"


@pytest.mark.long
def test_a_worker_that_is_stopped_amid_a_command_ends(yard: BatchYard) -> None:
    job = yard.job([completion(1)])
    assert yard.work(program=(PROGRAM, Moment.COUNTED)).wait(ENDS_S) == 0
    assert yard.seen(job)["status"] == "completed"


@pytest.mark.long
def test_a_worker_that_is_stopped_as_it_forks_hands_its_job_back(yard: BatchYard) -> None:
    endless = completion(1, max_tokens=100_000, ignore_eos=True)
    job = yard.job([endless])
    assert yard.work(program=(PROGRAM, Moment.FORKED)).wait(ENDS_S) == 0
    waiting = yard.seen(job)
    assert (waiting["rq_status"], waiting["retries_left"]) == ("queued", 5)


@pytest.mark.long
def test_a_worker_ends_with_a_scheduler_that_has_not_begun(yard: BatchYard) -> None:
    job = yard.job([completion(1)])
    assert yard.work("--burst", program=(PROGRAM, Moment.SCHEDULED)).wait(ENDS_S) == 0
    assert yard.log.count("Acquired scheduler lock") == 2  # at first, and after the job
    assert yard.seen(job)["status"] == "completed"


@pytest.mark.long
def test_a_worker_that_is_stopped_while_the_broker_is_away_ends(
    new_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = new_server("valkey", aof=False)
    # Given a worker that tries again and again to connect
    words = ("--redis-url", server.url, "batch", "worker")
    with Command(tmp_path / "log", *words) as worker:
        with open_connection(server.url) as connection:
            wait_for_waiting_workers(connection, 1)
        server.kill()
        eventually(lambda: "tries again" in worker.said)
        # If it is stopped, I expect it to end.
        worker.process.terminate()
        worker.process.wait(ENDS_S)
