"""Batch jobs whose input was corrected: what has a result keeps it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.batch.conftest import Job, WriteLines, bad, completion, objects
from tests.support.processes import Plant
from tokenyard.batch import OutputInUse
from tokenyard.batch.outputs import LineFile, Outputs
from tokenyard.protocol.errors import SettingsError


def results(job: Job) -> dict[str, tuple[int, str]]:
    """Input line and request of each result by its id."""
    return {
        one["custom_id"]: (int(one["id"].rpartition("_")[2]), one["response"]["request_id"])
        for one in job.answered()
    }


@pytest.fixture(params=["out.jsonl", "out.jsonl.gz"])
def job(
    request: pytest.FixtureRequest, plant: Plant, write_lines: WriteLines, tmp_path: Path
) -> Job:
    made = Job(plant, write_lines, tmp_path / request.param)
    made.run([bad(n) if n % 5 == 0 else completion(n) for n in range(20)])
    return made


def test_corrected_lines_run_and_results_stay(job: Job) -> None:
    before = results(job)
    # Given a file whose wrong lines were corrected at its end, but for one, with a new one
    good = [completion(n) for n in range(20) if n % 5]
    corrected = [bad(0), *reversed(good), *(completion(n) for n in (5, 10, 15, 99))]
    # If the errors are retried
    state = job.run(corrected, retry_errors=True)
    # I expect each line to have an answer, and the results of before to be the same,
    assert (state.status, state.counts.total) == ("completed", 21)
    assert (state.counts.completed, state.counts.failed) == (20, 1)
    [error] = objects(job.errors)
    assert (error["custom_id"], error["error"]["line"]) == ("line-0", 1)
    after = results(job)
    assert {name: after[name][1] for name in before} == {
        name: request for name, (_, request) in before.items()
    }
    # by the numbers that their lines have now.
    ids = [line["custom_id"] for line in corrected]
    assert after == {name: (ids.index(name) + 1, after[name][1]) for name in after}
    # And nothing to be left.
    again = job.run(corrected)
    assert (again.status, again.counts) == ("completed", state.counts)
    assert results(job) == after


def test_a_changed_file_is_refused_with_what_would_be_lost(job: Job) -> None:
    before = job.target.read_bytes(), job.errors.read_bytes()
    with pytest.raises(SettingsError) as refused:
        job.run([completion(n) for n in range(20)])
    assert "--retry-errors runs these again and keeps the results" in str(refused.value)
    assert "--overwrite deletes its 16 results and 4 errors" in str(refused.value)
    assert (job.target.read_bytes(), job.errors.read_bytes()) == before


def test_a_file_without_the_line_of_a_result_is_refused(job: Job, tmp_path: Path) -> None:
    before = results(job)
    with pytest.raises(SettingsError, match="no line 'line-1' any more, which has a result"):
        job.run([completion(n) for n in range(20) if n != 1], retry_errors=True)
    assert results(job) == before
    assert not list(tmp_path.glob("new.*"))
    # With the line put back, I expect it to go on.
    state = job.run([completion(n) for n in range(20)], retry_errors=True)
    assert (state.counts.completed, state.counts.failed) == (20, 0)


def test_an_output_that_was_replaced_stays_locked(tmp_path: Path) -> None:
    # Given a process that waits for the lock of an output which its owner then replaces
    late = LineFile(tmp_path / "out")
    with contextlib.closing(late), Outputs(tmp_path / "out", tmp_path / "errors") as outputs:
        outputs.renumber("batch_a", {})
        with pytest.raises(OutputInUse):
            late.lock(0.0)
        with pytest.raises(OutputInUse):
            Outputs(tmp_path / "out", tmp_path / "other")
