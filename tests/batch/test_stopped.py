"""A batch worker that is stopped by SIGTERM at an awkward moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rq import Retry

from tests.batch.conftest import ENDS_S, BatchYard, RqYard, WriteLines, completion
from tests.batch.interrupted import Moment
from tests.batch.running import wait_for_waiting_workers
from tests.cli.running import Command
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.batch.asking import Ending
from tokenyard.batch.opening import OpenJob
from tokenyard.batch.rq import work
from tokenyard.batch.rq.work import Stopped, WorkerContext
from tokenyard.batch.state import BatchSpec
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


class Ignoring:
    """Is stopped, and ignores what that raises, as Python does in a destructor."""

    def __init__(self) -> None:
        self._is_interrupted = threading.Event()

    def answers(self, check: Callable[[], None]) -> Iterator[Any]:
        with contextlib.suppress(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
        assert self._is_interrupted.wait(ENDS_S)
        check()
        yield from ()

    def interrupt(self) -> None:
        self._is_interrupted.set()

    def cancel(self) -> None: ...


def test_a_job_that_has_ignored_its_stop_ends(
    valkey_broker: Server,
    monkeypatch: pytest.MonkeyPatch,
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(WorkerContext, "is_stopping", False)
    source = write_lines("in.jsonl", [completion(1)])
    spec = BatchSpec(input=str(source), output=str(tmp_path / "out.jsonl"))
    job = RqYard(valkey_broker.url).given(spec, monkeypatch)

    @contextlib.contextmanager
    def asking(_job: OpenJob, _ending: Ending) -> Iterator[Ignoring]:
        yield Ignoring()

    assert isinstance(work.carry_out(job.order, asking), Retry)


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
