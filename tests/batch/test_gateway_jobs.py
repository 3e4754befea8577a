"""Batches of gateways whose workers are gone for good."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import msgspec
import pytest
import rq

from gateway.batches.files import FileStore, name_of, new_id
from gateway.batches.jobs import BatchJobs
from gateway.batches.records import BatchRecord, read_batch
from gateway.batches.storage import FolderStorage
from gateway.http.principal import Principal
from tests.batch.conftest import RqYard
from tests.support.servers import Server
from tokenyard.batch.runner import BatchBroken, Runner
from tokenyard.batch.state import BatchSpec, BatchState, load_state

TENANT = "research"
#: Long ago enough for the window, and the time that a worker gets to say that it is over.
LONG_AGO_S = 3600 + 200


class Jobs(RqYard):
    """A gateway's view of one batch, and RQ's."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url)
        self.storage = FolderStorage(folder)
        self.jobs = BatchJobs(self.storage, FileStore(self.storage), url, self.yard)

    def submit(self, created_at: float) -> BatchRecord:
        body = {"input_file_id": new_id(), "endpoint": "/v1/completions"}
        asked = read_batch(body | {"completion_window": "1h"}, "http", None, int(created_at))
        self.jobs.submit(Principal(tenant=TENANT), asked)
        self.storage.write(name_of(TENANT, asked.output_file_id), b"{}\n")
        return asked

    def begin(self, record: BatchRecord, heartbeat_age_s: float) -> None:
        """Let a worker take the job, and be silent since."""
        job = self.queue.find(record.id)
        job.meta["status"] = "in_progress"
        job.save_meta()  # type: ignore[no-untyped-call]
        job.set_status(rq.job.JobStatus.STARTED)
        now = datetime.datetime.now(datetime.UTC)
        job.heartbeat(now - datetime.timedelta(seconds=heartbeat_age_s), 60)


@pytest.fixture
def jobs(valkey_broker: Server, tmp_path: Path) -> Jobs:
    return Jobs(valkey_broker.url, tmp_path)


@pytest.mark.parametrize("heartbeat_age_s", [None, 600.0], ids=["waits", "worker-is-gone"])
def test_a_batch_that_nobody_runs_expires_with_what_it_has(
    jobs: Jobs, heartbeat_age_s: float | None
) -> None:
    record = jobs.submit(time.time() - LONG_AGO_S)
    if heartbeat_age_s is not None:
        jobs.begin(record, heartbeat_age_s)
    found = jobs.jobs.describe(TENANT, record)

    assert found["status"] == "expired"
    assert found["expired_at"] == found["expires_at"] == record.created_at + 3600
    assert found["output_file_id"] == record.output_file_id
    assert found["error_file_id"] is None
    assert jobs.jobs.is_over(TENANT, record)


@pytest.mark.parametrize(
    ("age_s", "heartbeat_age_s"), [(LONG_AGO_S, 1.0), (60.0, 600.0)], ids=["runs", "has-time"]
)
def test_a_batch_that_may_go_on_does_not_expire(
    jobs: Jobs, age_s: float, heartbeat_age_s: float
) -> None:
    record = jobs.submit(time.time() - age_s)
    jobs.begin(record, heartbeat_age_s)

    assert jobs.jobs.describe(TENANT, record)["status"] == "in_progress"
    assert not jobs.jobs.is_over(TENANT, record)


def test_a_batch_tells_the_tokens_of_its_results(jobs: Jobs) -> None:
    record = jobs.submit(time.time())
    assert jobs.jobs.describe(TENANT, record)["usage"] is None
    job = jobs.queue.find(record.id)
    job.meta["usage"] = {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12}
    job.save_meta()  # type: ignore[no-untyped-call]
    assert jobs.jobs.describe(TENANT, record)["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


@pytest.mark.parametrize("status", ["cancelled", "cancelling"])
def test_a_cancelled_batch_tells_since_when(jobs: Jobs, status: str) -> None:
    before = int(time.time())
    record = jobs.submit(before)
    if status == "cancelling":
        jobs.begin(record, heartbeat_age_s=0.0)
    for _ in range(2):
        jobs.jobs.cancel(record)
    found = jobs.jobs.describe(TENANT, record)
    assert found["status"] == status
    assert before <= found["cancelling_at"] <= time.time()
    assert found["cancelled_at"] == (found["cancelling_at"] if status == "cancelled" else None)


def test_a_file_without_any_request_fails_the_batch(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("This is\na letter, no JSONL.\n")
    spec = BatchSpec(
        input=str(tmp_path / "in"), output=str(tmp_path / "out"), endpoint="/v1/completions"
    )
    runner = Runner(jobs.url, jobs.yard, spec)
    with pytest.raises(BatchBroken, match="the input file has no request"):
        runner.run()
    state = load_state(spec.state_path)
    assert state is not None
    assert (state.status, state.counts.done) == ("failed", 0)


def test_a_batch_that_rq_has_given_up_and_forgotten_has_failed(jobs: Jobs) -> None:
    record = jobs.submit(time.time())
    output = name_of(TENANT, record.output_file_id)
    state = BatchState(
        id=record.id, spec=BatchSpec(input="in", output=output), status="in_progress"
    )
    state.times["opened"] = time.time()
    jobs.storage.write(f"{output}.state", msgspec.json.encode(state))
    jobs.queue.find(record.id).delete()
    found = jobs.jobs.describe(TENANT, record)

    assert (found["status"], found["output_file_id"]) == ("failed", record.output_file_id)


def test_a_batch_whose_job_was_changed_by_others_is_no_server_error(jobs: Jobs) -> None:
    record = jobs.submit(time.time() - 600)
    jobs.connection.hset(rq.job.Job.key_for(record.id), "data", b"\x80\x04pickle")

    found = jobs.jobs.describe(TENANT, record)

    assert (found["status"], found["errors"]["data"][0]["message"]) == (
        "failed",
        "the batch is not known",
    )
