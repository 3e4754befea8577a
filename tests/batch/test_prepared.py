"""What a batch worker does before it forks for a job."""

from __future__ import annotations

import shlex
import signal
import sys

import pytest

from tests.batch.conftest import ENDS_S, BatchYard, completion
from tokenyard.process.program import Exit


def work_off(yard: BatchYard, preparation: str, status: int = 0) -> tuple[int, str]:
    """Let a worker with this preparation run what waits; its pid and its log."""
    worker = yard.work("--burst", program=("tests.batch.prepared", preparation))
    assert worker.wait(ENDS_S) == status
    return worker.pid, yard.log


def submit(yard: BatchYard, number: int, *options: object) -> str:
    source = yard.write(f"in-{number}.jsonl", [completion(number)])
    return yard.submit(source, "-o", yard.folder / f"out-{number}.jsonl", *options)


@pytest.mark.long
def test_the_process_that_forks_is_prepared(yard: BatchYard) -> None:
    jobs = [submit(yard, number) for number in range(2)]
    pid, log = work_off(yard, "tell")
    prepared = [line.split()[1] for line in log.splitlines() if line.startswith("prepared ")]
    assert prepared == [str(pid)] * 2
    assert [yard.seen(job)["status"] for job in jobs] == ["completed"] * 2


@pytest.mark.long
def test_a_worker_that_is_stopped_while_it_prepares_hands_its_job_back(yard: BatchYard) -> None:
    job = submit(yard, 1)
    work_off(yard, "be_stopped")
    waiting = yard.seen(job)
    assert (waiting["rq_status"], waiting["retries_left"]) == ("queued", 5)
    assert waiting["request_counts"]["completed"] == 0


@pytest.mark.long
def test_the_job_of_a_worker_that_is_killed_while_it_prepares_continues(yard: BatchYard) -> None:
    job = submit(yard, 1)
    work_off(yard, "be_killed", -signal.SIGKILL)
    assert yard.queue.rq.intermediate_queue.get_job_ids() == []
    # If the next worker of this host starts, I expect it to begin with this job.
    work_off(yard, "tell")
    assert yard.seen(job)["status"] == "completed"


@pytest.mark.long
def test_a_job_that_is_cancelled_while_its_worker_prepares_ends(yard: BatchYard) -> None:
    # Given an endless job
    job = yard.job([completion(1, max_tokens=100_000)], "--param", "ignore_eos=true")
    _, log = work_off(yard, "be_cancelled")
    assert "cancelling" in log.split()
    cancelled = yard.seen(job, Exit.FAILED)
    assert (cancelled["status"], cancelled["rq_status"]) == ("cancelled", "failed")
    assert cancelled["request_counts"] == {"total": 1, "completed": 0, "failed": 1}


@pytest.mark.long
def test_a_command_of_a_user_has_no_variable_of_an_import(yard: BatchYard) -> None:
    found = yard.folder / "found"
    program = f"import os; open({str(found)!r}, 'w').write(' '.join(os.environ))"
    submit(yard, 1, "--on-success", shlex.join([sys.executable, "-c", program]))
    work_off(yard, "set_variable")
    names = found.read_text().split()
    assert "SET_BY_AN_IMPORT" not in names
    assert {"TOKENYARD_BATCH_ID", "RQ_JOB_ID", "PATH"} <= set(names)


@pytest.mark.long
@pytest.mark.parametrize("preparation", ["fail", "nowhere"])
def test_a_job_runs_without_its_preparation(yard: BatchYard, preparation: str) -> None:
    job = submit(yard, 1)
    work_off(yard, preparation)
    assert yard.seen(job)["status"] == "completed"
