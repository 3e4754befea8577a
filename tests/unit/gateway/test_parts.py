"""The outputs of jobs on S3 that RQ has given up: made of what their workers have kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gateway.batches import parts
from gateway.batches.files import FileStore, StoredFile
from gateway.batches.parts import WholeOutputs
from tests.support.s3 import needs_s3
from tests.unit.gateway.test_spool import LINES, TENANT, Job, write
from tokenyard.batch.outputs import OutputInUse

pytestmark = needs_s3
OUT, ERRORS = f"{TENANT}/out", f"{TENANT}/errors"


@pytest.fixture
def job(s3: str) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(s3, stack)


@pytest.fixture
def whole(job: Job, s3: str) -> WholeOutputs:
    from gateway.batches.s3 import S3Storage

    return WholeOutputs(S3Storage(s3))


def test_the_lines_of_a_job_that_was_given_up_become_its_outputs(
    job: Job, whole: WholeOutputs
) -> None:
    # Given a worker that has answered some lines
    worker = job.worker()
    write(worker, b"".join(LINES[:3]), LINES[3])
    worker.hand_over()
    write(worker, LINES[4])
    worker.hand_over()
    # If nobody goes on,
    assert whole.are_whole(OUT, ERRORS)
    # I expect its lines in the outputs, once,
    assert job.storage.read("out") == b"".join([*LINES[:3], LINES[4]])
    assert job.storage.read("errors") == LINES[3]
    assert job.storage.read("out.state") == worker.spec.state_path.read_bytes()
    before = job.names()
    assert whole.are_whole(OUT, ERRORS)
    assert job.names() == before
    # the worker to stop if it lives,
    write(worker, LINES[5])
    with pytest.raises(OutputInUse):
        worker.publish()
    # and the next one, where an operator wants it, to go on.
    second = job.worker()
    assert second.spec.output_path.read_bytes() == job.storage.read("out")
    write(second, LINES[6])
    second.hand_over()
    assert whole.are_whole(OUT, ERRORS)
    assert job.storage.read("out").endswith(LINES[4] + LINES[6])
    third = job.worker()
    third.publish()
    assert job.names() == {"in", "out", "errors", "out.state"}


def test_a_file_that_was_begun_again_counts_from_there(job: Job, whole: WholeOutputs) -> None:
    worker = job.worker()
    write(worker, LINES[0], LINES[1])
    worker.hand_over()
    worker.spec.errors_path.rename(worker.spec.errors_path.with_name("old"))
    write(worker, LINES[2], LINES[3])
    worker.hand_over()

    assert whole.are_whole(OUT, ERRORS)
    assert job.storage.read("out") == LINES[0] + LINES[2]
    assert job.storage.read("errors") == LINES[3]


def test_outputs_that_are_stored_already_are_left_alone(job: Job, whole: WholeOutputs) -> None:
    # Given a worker that has stored its outputs, and is deleting the parts
    worker = job.worker()
    for number in range(3):
        write(worker, LINES[number])
        worker.hand_over()
    job.storage.write("out", b"stored")
    job.storage.delete("out.parts/000001")

    assert whole.are_whole(OUT, ERRORS)
    assert job.storage.read("out") == b"stored"


def test_nobody_waits_long_for_outputs_to_be_made(
    job: Job, whole: WholeOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a bucket that takes its time
    worker = job.worker()
    write(worker, LINES[0])
    worker.hand_over()
    goes_on, read = threading.Event(), parts.read_part

    def slow(*arguments: Any) -> Any:
        assert goes_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(parts, "read_part", slow)
    monkeypatch.setattr(parts, "_WAIT_S", 0.01)
    # I expect to be told to ask again, until they are there.
    assert not whole.are_whole(OUT, ERRORS)
    assert "out" not in job.names()
    monkeypatch.setattr(parts, "_WAIT_S", 10.0)
    goes_on.set()
    while not whole.are_whole(OUT, ERRORS):
        pass
    assert job.storage.read("out") == LINES[0]


def test_with_an_output_its_parts_are_deleted(job: Job, whole: WholeOutputs) -> None:
    name = "file-" + 32 * "0"
    worker = job.worker()
    write(worker, LINES[0])
    worker.hand_over()
    for one in job.storage.names("out.parts/"):
        job.storage.write(one.replace("out", name), job.storage.read(one))
        job.storage.delete(one)
    files = FileStore(whole._storage)
    assert whole.are_whole(f"{TENANT}/{name}", ERRORS)
    files.publish("a b", StoredFile(id=name, filename="", purpose="batch_output"))

    assert files.delete("a b", name)
    assert not list(job.storage.names(f"{name}.parts/"))
    assert job.names() == {"in", f"{name}.state"}
