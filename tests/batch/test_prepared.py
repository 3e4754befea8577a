"""What a batch worker does before it forks for a job."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.batch.conftest import ENDS_S, BatchYard, completion
from tests.batch.running import words
from tests.cli.running import environment
from tests.support.processes import ROOT


def work_off(yard: BatchYard, preparation: str) -> tuple[int, str]:
    """Let a worker with this preparation run what waits; its pid and its log."""
    command = [sys.executable, "-m", "tests.batch.prepared", preparation]
    log = yard.folder / "prepared.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *words(yard.plant, "worker", "--burst")],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            assert process.wait(ENDS_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
    return process.pid, log.read_text()


def submit(yard: BatchYard, number: int) -> str:
    source = yard.write(f"in-{number}.jsonl", [completion(number)])
    return yard.submit(source, "-o", yard.folder / f"out-{number}.jsonl")


def test_the_process_that_forks_is_prepared(yard: BatchYard) -> None:
    jobs = [submit(yard, number) for number in range(2)]
    pid, log = work_off(yard, "tell")
    prepared = [line.split()[1] for line in log.splitlines() if line.startswith("prepared ")]
    assert prepared == [str(pid)] * 2
    assert [yard.seen(job)["status"] for job in jobs] == ["completed"] * 2


def test_a_worker_that_is_stopped_while_it_prepares_hands_its_job_back(yard: BatchYard) -> None:
    job = submit(yard, 1)
    work_off(yard, "be_stopped")
    waiting = yard.seen(job)
    assert (waiting["rq_status"], waiting["retries_left"]) == ("queued", 5)
    assert waiting["request_counts"]["completed"] == 0


@pytest.mark.parametrize("preparation", ["fail", "nowhere"])
def test_a_job_runs_without_its_preparation(yard: BatchYard, preparation: str) -> None:
    job = submit(yard, 1)
    work_off(yard, preparation)
    assert yard.seen(job)["status"] == "completed"
