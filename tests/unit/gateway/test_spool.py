"""The files of a batch job on S3: what is kept of them, by whom, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.support.s3 import needs_s3
from tokenyard.batch.answers import OutputLine, line_id
from tokenyard.batch.opening import open_job
from tokenyard.batch.outputs import OutputInUse
from tokenyard.batch.state import BatchSpec, BatchState, RequestCounts

if TYPE_CHECKING:
    from gateway.batches.spool import Spool

pytestmark = needs_s3
TENANT = "tenant-a%20b"
LINES = [b'{"id": "batch_req_1_%d"}\n' % number for number in range(100)]


class Job:
    """Batch workers of one job, each with a folder of its own."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        from gateway.batches.s3 import S3Storage

        # As a gateway writes it, for a tenant whose name is quoted
        gateways = S3Storage(url)
        gateways.write(f"{TENANT}/in", b"the input")
        names = {name: gateways.location(f"{TENANT}/{name}") for name in ("in", "out", "errors")}
        self.storage = S3Storage(f"{url}/{TENANT}")
        self.spec = BatchSpec(input=names["in"], output=names["out"], errors=names["errors"])
        self._stack = stack

    def worker(self) -> Spool:
        from gateway.batches.spool import spooled

        return self._stack.enter_context(spooled(self.spec))

    def names(self) -> set[str]:
        return {*self.storage.names("")} | {*self.storage.names("out.parts/")}


@pytest.fixture
def job(s3: str) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(s3, stack)


def write(worker: Spool, results: bytes, errors: bytes = b"") -> None:
    with worker.spec.output_path.open("ab") as file:
        file.write(results)
    with worker.spec.errors_path.open("ab") as file:
        file.write(errors)
    BatchState(id="batch_1", spec=worker.spec).save()


def test_another_worker_goes_on_where_the_first_was_killed(job: Job) -> None:
    # Given a worker that is killed behind two parts, in the middle of a line
    first = job.worker()
    assert first.spec.input_path.read_bytes() == b"the input"
    assert [one.name for one in first.spec.input_path.parent.iterdir()] == ["input"]
    write(first, b"".join(LINES[:40]), LINES[40])
    first.hand_over()
    write(first, LINES[41] + b'{"id"', LINES[42])
    first.hand_over()
    write(first, LINES[43])
    # I expect the next one to find what the parts have,
    second = job.worker()
    assert second.spec.output_path.read_bytes() == b"".join(LINES[:40]) + LINES[41]
    assert second.spec.errors_path.read_bytes() == LINES[40] + LINES[42]
    assert msgspec.json.decode(second.spec.state_path.read_bytes())["id"] == "batch_1"
    # nothing to be seen of it before the end,
    assert job.names() == {"in", "out.parts/000001", "out.parts/000002"}
    # and then the whole files alone.
    write(second, LINES[43] + LINES[44])
    second.hand_over()
    assert job.worker().spec.output_path.read_bytes() == second.spec.output_path.read_bytes()
    second.publish()
    assert job.names() == {"in", "out", "errors", "out.state"}
    assert job.storage.read("out") == second.spec.output_path.read_bytes()
    assert job.storage.read("errors") == LINES[40] + LINES[42]


def test_a_job_goes_on_from_the_parts_of_another_folder(job: Job) -> None:
    # Given a job with some answers, whose worker was killed
    lines = b"".join(b'{"id": "%d", "prompt": "x"}\n' % number for number in range(1, 11))
    job.storage.write("in", lines)
    first = job.worker()
    with open_job(first.spec, job_id="batch_1") as opened:
        for number in (1, 2, 3):
            opened.outputs.write(number, OutputLine(id=line_id("batch_1", number)))
        opened.outputs.flush()
        first.hand_over()
    # If the next one opens it
    second = job.worker()
    with open_job(second.spec, job_id="batch_1") as again:
        # I expect it to know what is done.
        assert (again.state.id, again.counts) == ("batch_1", RequestCounts(10, 3, 0))
        assert 3 in again.outputs.done
        assert 4 not in again.outputs.done
        again.outputs.write(4, OutputLine(id=line_id("batch_1", 4)))
        again.outputs.flush()
        second.publish()
    # The same where a job that was over runs again
    third = job.worker()
    with open_job(third.spec, job_id="batch_1") as once_more:
        assert once_more.counts == RequestCounts(10, 4, 0)


def test_of_two_workers_the_slower_one_stops(job: Job) -> None:
    slow, fast = job.worker(), job.worker()
    write(fast, LINES[0])
    fast.hand_over()
    write(slow, LINES[0])
    with pytest.raises(OutputInUse):
        slow.hand_over()
    assert job.worker().spec.output_path.read_bytes() == LINES[0]


def test_a_part_whose_acknowledgement_was_lost_counts(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = job.worker()
    write(worker, LINES[0])
    written = worker._storage.write

    def twice(name: str, content: bytes, *, is_exclusive: bool = False) -> None:
        written(name, content, is_exclusive=is_exclusive)
        written(name, content, is_exclusive=is_exclusive)

    monkeypatch.setattr(worker._storage, "write", twice)
    worker.hand_over()
    assert job.names() == {"in", "out.parts/000001"}


@pytest.mark.long
def test_what_is_added_is_kept_about_every_five_seconds_or_sooner(job: Job) -> None:
    worker = job.worker()
    write(worker, LINES[0])
    worker.keep()
    assert job.names() == {"in"}
    worker._kept_at -= 60
    worker.keep()
    assert job.names() == {"in", "out.parts/000001"}
    # Nothing new, no part.
    worker._kept_at -= 60
    worker.keep()
    # Much at once: several parts, of a bounded size.
    write(worker, LINES[1] * 10**6)
    worker.keep()
    count = len(LINES[0] + LINES[1] * 10**6) // 2**23 + 2
    assert job.names() == {"in", *(f"out.parts/{number:06}" for number in range(1, count + 1))}
    assert job.worker().spec.output_path.read_bytes() == worker.spec.output_path.read_bytes()
    # A line that is longer than a part: one part.
    write(worker, bytes(2 * 2**23) + b"\n")
    worker.keep()
    assert job.worker().spec.output_path.read_bytes() == worker.spec.output_path.read_bytes()


def test_a_job_that_was_over_goes_on_with_fewer_errors(job: Job) -> None:
    # Given a job that is over, and runs again
    first = job.worker()
    write(first, LINES[0], LINES[1] + LINES[2])
    first.publish()
    again = job.worker()
    assert again.spec.errors_path.read_bytes() == LINES[1] + LINES[2]
    again.hand_over()
    # If some errors run again, the file is longer than before, and the worker is killed
    new = again.spec.errors_path.with_name("new")
    new.write_bytes(LINES[2])
    new.replace(again.spec.errors_path)
    write(again, LINES[1], LINES[3] + LINES[4])
    again.hand_over()
    # I expect the next one to have each line once.
    last = job.worker()
    assert last.spec.errors_path.read_bytes() == LINES[2] + LINES[3] + LINES[4]
    assert last.spec.output_path.read_bytes() == LINES[0] + LINES[1]


def test_a_storage_that_fails_does_not_end_the_job(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = job.worker()
    write(worker, LINES[0])

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "no answer")

    monkeypatch.setattr(worker._storage, "write", fails)
    worker._kept_at -= 60
    worker.keep()
    monkeypatch.undo()
    worker._kept_at -= 60
    worker.keep()
    assert "out.parts/000001" in job.names()
