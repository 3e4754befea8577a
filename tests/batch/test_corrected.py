"""Batch jobs whose input was corrected: what has a result keeps it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.batch.conftest import Lines, WriteLines, completion, objects
from tests.support.processes import Plant
from tokenyard.batch import BatchState, OutputInUse, run_batch
from tokenyard.batch.outputs import LineFile, Outputs
from tokenyard.protocol.errors import SettingsError


class Corrected:
    """A job of lines of which every fifth is wrong, and its run again with others."""

    def __init__(self, plant: Plant, write: WriteLines, target: Path) -> None:
        self._plant, self._write = plant, write
        self.target = target
        self.errors = target.with_name(target.name.replace("out.", "out.errors."))

    def run(self, lines: Lines, **options: Any) -> BatchState:
        source = self._write("in.jsonl", lines)
        place = {"redis_url": self._plant.url, "yard": self._plant.keys.yard}
        return run_batch(source, self.target, **place, **options)

    def results(self) -> dict[str, tuple[int, str]]:
        """Input line and request of each result by its id."""
        return {
            one["custom_id"]: (
                int(one["id"].rpartition("_")[2]),
                one["response"]["request_id"],
            )
            for one in objects(self.target)
        }


@pytest.fixture(params=["out.jsonl", "out.jsonl.gz"])
def job(
    request: pytest.FixtureRequest, plant: Plant, write_lines: WriteLines, tmp_path: Path
) -> Corrected:
    made = Corrected(plant, write_lines, tmp_path / request.param)
    made.run([bad(n) if n % 5 == 0 else completion(n) for n in range(20)])
    return made


def bad(number: int) -> dict[str, Any]:
    return completion(number, temperature=-1)


def test_corrected_lines_run_and_results_stay(job: Corrected) -> None:
    before = job.results()
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
    after = job.results()
    assert {name: after[name][1] for name in before} == {
        name: request for name, (_, request) in before.items()
    }
    # by the numbers that their lines have now.
    ids = [line["custom_id"] for line in corrected]
    assert after == {name: (ids.index(name) + 1, after[name][1]) for name in after}
    # And nothing to be left.
    again = job.run(corrected)
    assert (again.status, again.counts) == ("completed", state.counts)
    assert job.results() == after


def test_a_changed_file_is_refused_with_what_would_be_lost(job: Corrected) -> None:
    before = job.target.read_bytes(), job.errors.read_bytes()
    with pytest.raises(SettingsError) as refused:
        job.run([completion(n) for n in range(20)])
    assert "--retry-errors runs these again and keeps the results" in str(refused.value)
    assert "--overwrite deletes its 16 results and 4 errors" in str(refused.value)
    assert (job.target.read_bytes(), job.errors.read_bytes()) == before


def test_a_file_without_the_line_of_a_result_is_refused(job: Corrected, tmp_path: Path) -> None:
    before = job.results()
    with pytest.raises(SettingsError, match="no line 'line-1' any more, which has a result"):
        job.run([completion(n) for n in range(20) if n != 1], retry_errors=True)
    assert job.results() == before
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
