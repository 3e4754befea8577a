"""The pages of batch jobs, with real RQ and its workers."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.batch.conftest import BatchYard, completion, write_lines, yard
from tests.board.calls import Calls
from tests.board.looking import Looker, looking, text_of
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.batch.answers import LineError, OutputLine, encode_line, read_line_errors
from tokenyard.batch.rq.jobs import PERFORM_FOR_GATEWAYS, BatchQueue, JobOrder
from tokenyard.batch.rq.listing import PLACES
from tokenyard.batch.state import BatchSpec
from tokenyard.board.page import Actor
from tokenyard.ops import batches as ops
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Yard

__all__ = ["write_lines", "yard"]
pytestmark = pytest.mark.valkey_only


@pytest.fixture
def live(yard: BatchYard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Looker]:
    with looking(monkeypatch, yard.plant.url, yard.plant) as made:
        yield made


@pytest.fixture
def queue(connection: redis.Redis, keys: Any) -> BatchQueue:
    """A queue that no worker serves."""
    return BatchQueue(connection, keys.yard)


def enqueue(queue: BatchQueue, name: str = "", **options: Any) -> str:
    """Enqueue a job; its id."""
    spec = BatchSpec(**({"input": "/data/in.jsonl", "output": "/data/out.jsonl"} | options))
    order = JobOrder(spec=spec, on_success="https://example.org/?token=secret")
    return queue.enqueue(order, job_id=name).id


def test_no_jobs_are_told_in_words(looker: Looker) -> None:
    assert "No batch was submitted to RQ" in looker.get("/batches")
    for place in PLACES:
        assert f"No batch is {place}." in looker.get("/batches", parameters={"place": place})
    assert "There is no batch job" in text_of(looker.get("/batches/batch_no", status=404))


def test_without_rq_the_page_says_what_to_install(
    looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "is_installed", lambda: False)
    assert "Batch jobs run at RQ, which is not installed here: pip" in looker.get("/batches")
    for path in ("/batches/x", "/do/batch.cancel?job=x", "/do/batch.resume?job=x"):
        assert "pip install" in looker.get(path, status=400)


def test_without_its_rights_the_page_says_which(
    broker: Server, bare: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = f"board-{bare.keys.yard}"
    own = [f"tokenyard:{{{bare.keys.yard}}}:*"]
    bare.connection.acl_setuser(user, enabled=True, passwords="+pw", commands=["+@all"], keys=own)
    url = broker.url.replace("redis://", f"redis://{user}:pw@")
    try:
        with looking(monkeypatch, url, bare) as looker:
            assert "give it the rights of gateway-batches" in looker.get("/batches")
    finally:
        bare.connection.acl_deluser(user)


@pytest.mark.long
def test_a_job_is_followed_to_its_end(yard: BatchYard, live: Looker) -> None:
    lines = [completion(number) for number in range(20)] + ["{broken", completion(7, max_tokens=0)]
    job = yard.submit(yard.write("in.jsonl", lines), "-o", yard.folder / "out.jsonl")
    # Given a waiting job
    assert "Waiting 1" in text_of(live.get("/batches"))
    page = live.get(f"/batches/{job}")
    assert "validating" in page
    assert str(yard.folder / "in.jsonl") in page
    assert "an operator or a script" in text_of(page)
    # If a worker has run it, I expect its counts and its errors by line.
    yard.work_off()
    shown = text_of(live.get("/batches", parameters={"place": "completed"}))
    assert f"{job} in.jsonl completed" in shown
    assert "22 of 22 2" in shown
    page = live.get(f"/batches/{job}", parameters={"x": "2"})
    assert "Show the first 100" in page
    assert "not valid JSON" not in page
    errors = text_of(live.get(f"/batches/{job}", parameters={"errors": "open"}))
    assert "All 2" in errors
    assert "21 \N{EN DASH}" in errors
    assert "22 line-7" in errors


@pytest.mark.long
def test_a_running_job_is_cancelled_and_resumed(yard: BatchYard, live: Looker) -> None:
    # Given an endless job
    lines = [completion(number, max_tokens=100_000) for number in range(5)]
    source = yard.write("in.jsonl", [completion(99), *lines])
    target = yard.folder / "out.jsonl"
    job = yard.submit(source, "-o", target, "--param", "ignore_eos=true")
    worker = yard.work()
    eventually(lambda: target.exists() and target.stat().st_size, timeout_s=60)
    eventually(lambda: "Completed 1 " in look(live, job), timeout_s=30)
    shown = look(live, job)
    assert "in_progress" in shown
    assert "lines/s" in shown
    assert "RQ's worker" in shown

    # If it is cancelled
    asked = live.asked("batch.cancel", {"job": job})
    assert f"Cancel {job}. Answers stay; 5 lines without one get the error" in asked
    done = live.do("batch.cancel", {"job": job, "why": "wrong file"})
    assert (done.text, done.target) == (f"{job}: cancelling.", f"batch {job}")
    assert (done.action, done.why) == ("batch.cancel", "wrong file")

    # I expect an error for each line without an answer, and no way to cancel it again.
    eventually(lambda: "RQ: failed" in look(live, job), timeout_s=50)
    ended = yard.seen(job, Exit.FAILED)
    assert ended["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
    assert "cancelled" in look(live, job)
    errors = live.get(f"/batches/{job}", parameters={"errors": "open", "x": "1"})
    assert errors.count("batch_cancelled") == 5
    assert f"{job} is over: cancelled." in live.asked("batch.cancel", {"job": job})
    assert live.do("batch.cancel", {"job": job}).text == f"{job}: cancelled."

    # If it is resumed, I expect it to run again.
    asked = live.asked("batch.resume", {"job": job})
    assert "5 lines have an error" in asked
    done = live.do("batch.resume", {"job": job, "retry_errors": "on"})
    assert done.text == f"{job} waits for a worker again, with its errors."
    eventually(lambda: "RQ: started" in look(live, job), timeout_s=50)
    assert "is not over" in live.asked("batch.resume", {"job": job})
    assert live.post("batch.resume", {"job": job}).status_code == 400
    assert yard.call("cancel", job).stdout == f"{job}: cancelling\n"
    yard.call("status", job, "--wait", "--timeout", 50, status=1)
    worker.terminate()
    assert worker.wait(60) == 0


def look(looker: Looker, job: str) -> str:
    """The page of a job now, without what was read a moment ago."""
    return text_of(looker.get(f"/batches/{job}", parameters={"x": os.urandom(8).hex()}))


def test_jobs_are_listed_by_place_in_bounded_pages(
    looker: Looker, queue: BatchQueue, connection: redis.Redis
) -> None:
    names = [enqueue(queue, f"batch_{number:04}") for number in range(300)]
    ended = names[:120]
    for name in ended:
        queue.cancel(queue.find(name))
    looker.get("/batches", parameters={"x": "1"})
    calls = Calls(connection)
    page = looker.get("/batches", parameters={"x": "2"})
    made = calls.made()
    assert sum(made.values()) < 80, made
    assert "Waiting 180" in text_of(page)
    assert "Never begun 120" in text_of(page)
    assert page.count("/board/batches/batch_") == 20
    shown = []
    for number in range(1, 5):
        page = looker.get("/batches", parameters={"place": "waiting", "page": str(number)})
        shown += [name for name in names if f"/board/batches/{name}" in page]
        assert ("Next" in page) == (number < 4)
    assert shown == names[120:]
    assert calls.made()["hgetall"] < 300


def test_arguments_are_closed_and_their_secrets_for_admins(
    looker: Looker, queue: BatchQueue
) -> None:
    looker.actor = Actor("ada", "admin")
    name = enqueue(queue, params={"temperature": 0.5}, completion_window_s=3600.0)
    assert "temperature" not in looker.get("/batches")
    page = looker.get(f"/batches/{name}")
    assert "<details>\n" in page
    assert "token=secret" in page
    assert "3600s" in page
    looker.actor = Actor("olga", "operator")
    page = looker.get(f"/batches/{name}?x=1")
    assert "temperature" in page
    assert "hidden (33 characters)" in page
    assert "secret" not in page


def test_a_batch_tells_the_tokens_of_its_results(
    looker: Looker, queue: BatchQueue, connection: redis.Redis
) -> None:
    name = enqueue(queue)
    meta = {"usage": {"input_tokens": 12345, "output_tokens": 6, "total_tokens": 12351}}
    connection.hset(queue.find(name).key, "meta", json.dumps(meta))
    assert "Tokens 12,345 in, 6 out" in look(looker, name)


def test_a_batch_of_a_gateway_has_its_tenant_and_file_ids(
    looker: Looker, queue: BatchQueue
) -> None:
    spec = BatchSpec(
        input="s3://bucket/tenant-lab/file-0a",
        output="s3://bucket/tenant-lab/file-0b",
        errors="s3://bucket/tenant-lab/file-0c",
        tenant="lab",
        endpoint="/v1/completions",
    )
    job = queue.enqueue(JobOrder(spec=spec), function=PERFORM_FOR_GATEWAYS)
    listed = text_of(looker.get("/batches"))
    assert f"{job.id} file-0a validating" in listed
    assert listed.endswith("Z by lab")
    page = text_of(looker.get(f"/batches/{job.id}", parameters={"errors": "open"}))
    assert "a client of the gateway , tenant lab" in page or "gateway, tenant lab" in page
    assert "file-0b" in page
    assert "it lies in the gateway's storage" in page


HOSTILE: dict[str, dict[str, Any]] = {
    "no json": {"data": b"\x80\x04pickle"},
    "other arguments": {"data": zlib.compress(b'["tokenyard.batch.rq.work.perform", null, [], 3]')},
    "deep": {"data": zlib.compress(b"[" * 200_000)},
    "a meta of text": {"meta": b'"text"'},
    "counts of text": {"meta": b'{"request_counts": {"total": "<b>"}}'},
    "usage of text": {"meta": b'{"usage": {"input_tokens": "<b>"}}'},
    "negative counts": {"meta": b'{"request_counts": {"total": -5}}'},
    "no number": {"meta": b'{"eta_s": NaN, "lines_per_s": Infinity}'},
    "times of text": {"meta": b'{"completed_at": "x", "in_progress_at": 1e99}'},
    "a strange time": {"created_at": b"yesterday"},
    "a strange state": {"status": b"exploded"},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_a_job_that_cannot_be_read_does_not_hide_the_others(
    looker: Looker, queue: BatchQueue, connection: redis.Redis, fields: dict[str, Any]
) -> None:
    bad, good = enqueue(queue, "batch_bad"), enqueue(queue, "batch_good")
    connection.hset(queue.find(bad).key, mapping=fields)
    page = looker.get("/batches")
    assert f"/board/batches/{good}" in page
    assert "cannot be read" in page
    assert bad in page
    looker.get(f"/batches/{bad}", status=404)
    for action in ("batch.cancel", "batch.resume"):
        looker.get(f"/do/{action}", parameters={"job": bad}, status=400)
        assert looker.post(action, {"job": bad}).status_code == 400


# Errors by line


def failed(number: int, message: str = "no") -> bytes:
    return encode_line(
        OutputLine(id=f"batch_req_x_{number}", error=LineError("BAD", message, number))
    )


def test_only_errors_of_lines_are_shown_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_bytes(b"root:x:0:0\n" + failed(1) + b'{"error": "text"}\n' + b"[" * 90_000 + b"\n")
    found = read_line_errors(path)
    assert [one.error.line for one in found.lines] == [1]
    assert found.is_whole


def test_errors_are_read_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "errors.jsonl"
    path.write_bytes(b"".join(failed(number, "x" * 1_000) for number in range(2_000)))
    found = read_line_errors(path, 100)
    assert [one.error.line for one in found.lines] == list(range(100))
    assert not found.is_whole
    assert len(read_line_errors(path, 10_000).lines) < 1_100


def test_a_compressed_flood_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "errors.jsonl.gz"
    path.write_bytes(gzip.compress(failed(1) + bytes(200_000_000), 1))
    tracemalloc.start()
    found = read_line_errors(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.error.line for one in found.lines] == [1]
    assert most < 150_000_000  # a piece of 64 KiB may unpack to 64 MiB


def test_compressed_errors_are_read_as_far_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "errors.jsonl.gz"
    whole = gzip.compress(failed(1) + failed(2))
    path.write_bytes(whole + gzip.compress(failed(3))[:-9])
    found = read_line_errors(path)
    assert [one.error.line for one in found.lines][:2] == [1, 2]
    assert (found.is_whole, "not written yet" in found.problem) == (False, True)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "null"])
def test_what_is_no_file_of_errors_is_told(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("a\0b" if kind == "null" else kind)
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    found = read_line_errors(path)
    assert (found.lines, found.is_whole) == ((), False)
    assert found.problem
