"""Batch jobs under RQ: each command, on a live yard."""

from __future__ import annotations

import datetime
import http.server
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import rq

from tests.batch.conftest import ENDS_S, BatchYard, RqYard, WriteLines, completion, objects
from tests.cli.running import python
from tests.support.processes import is_gone
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.batch import submit_batch
from tokenyard.batch.rq.jobs import JobOrder
from tokenyard.batch.state import BatchSpec
from tokenyard.ops.audit import COMMAND_LINE
from tokenyard.process.program import Exit
from tokenyard.protocol.errors import SettingsError, WaitTimeout


@pytest.mark.long
def test_a_submitted_job_is_run_and_read_without_pickles(yard: BatchYard) -> None:
    lines = [completion(number) for number in range(100)] + ["{broken"]
    job = yard.submit(yard.write("in.jsonl", lines), "-o", yard.folder / "out.jsonl.gz")
    # Given a waiting job
    waiting = yard.seen(job)
    assert (waiting["status"], waiting["rq_status"]) == ("validating", "queued")
    # If a worker takes it
    yard.work_off()
    # I expect every command to show it as completed.
    done = yard.seen(job)
    assert (done["object"], done["status"], done["rq_status"]) == ("batch", "completed", "finished")
    assert done["request_counts"] == {"total": 101, "completed": 100, "failed": 1}
    assert done["created_at"] <= done["in_progress_at"] <= done["completed_at"]
    assert "101" in yard.call("status", job).stdout
    assert job in yard.call("list").stdout
    [listed] = json.loads(yard.call("list", "--json").stdout)
    assert listed["id"] == job
    results = [json.loads(line) for line in yard.call("results", job).stdout.splitlines()]
    assert len(results) == 100
    [error] = [
        json.loads(line) for line in yard.call("results", job, "--errors").stdout.splitlines()
    ]
    assert error["error"]["line"] == 101
    assert yard.call("results", job, "--path").stdout.strip() == str(yard.folder / "out.jsonl.gz")
    assert "101 input lines = 100 results + 1 errors" in yard.call("logs", job).stdout
    # RQ holds no pickle.
    assert_no_pickle(yard.plant.connection)
    # RQ's own tools read the job.
    assert yard.queue.find(job).get_meta()["request_counts"]["completed"] == 100
    info = python("-m", "rq.cli", "info", "--url", yard.plant.url, "--raw")
    assert yard.queue.rq.name in info.stdout, info.stderr


def assert_no_pickle(connection: redis.Redis) -> None:
    keys = [key for key in connection.scan_iter("rq:*") if connection.type(key) == b"hash"]
    values = {key: connection.hvals(key) for key in keys}
    assert any(values.values())
    for key, found in values.items():
        assert not [value for value in found if value.startswith(b"\x80")], key


@pytest.mark.long
def test_the_job_of_a_killed_worker_continues_immediately(yard: BatchYard) -> None:
    lines = 1_500
    target = yard.folder / "out.jsonl"
    job = yard.job([completion(number) for number in range(lines)], "--max-in-flight", 64)
    # If the job's worker is killed three times
    for _ in range(3):
        worker = yard.work()
        size = target.stat().st_size if target.exists() else 0
        eventually(lambda size=size: target.exists() and target.stat().st_size > size, timeout_s=60)
        family = [each.pid for each in psutil.Process(worker.pid).children(recursive=True)]
        worker.kill()
        worker.wait()
        # I expect its children to end with it,
        eventually(lambda family=family: all(map(is_gone, family)))
    yard.work()
    done = yard.ended(job)
    # and each line to have one answer.
    assert done["status"] == "completed"
    assert sorted(line["custom_id"] for line in objects(target)) == sorted(
        f"line-{number}" for number in range(lines)
    )


def test_a_job_whose_process_is_killed_continues(yard: BatchYard) -> None:
    target = yard.folder / "out.jsonl"
    job = yard.job([completion(number) for number in range(1_500)])
    yard.work()
    eventually(lambda: target.exists() and target.stat().st_size > 0, timeout_s=60)
    # If only the job's process is killed, as by the kernel for its memory
    [worker] = rq.Worker.all(queue=yard.queue.rq)
    horses = [each for each in psutil.Process(worker.pid).children() if _is_horse(each)]
    [horse] = horses
    horse.kill()
    # I expect the worker to continue the job.
    done = yard.ended(job)
    assert done["request_counts"] == {"total": 1500, "completed": 1500, "failed": 0}


def _is_horse(process: psutil.Process) -> bool:
    """Whether a process leads its group, as a job's process does, but not RQ's scheduler."""
    return os.getpgid(process.pid) == process.pid


@pytest.mark.long
def test_a_try_that_exceeds_its_time_is_the_last(yard: BatchYard) -> None:
    source = yard.write("in.jsonl", [completion(1), completion(2, max_tokens=100_000)])
    endless = ("--param", "ignore_eos=true")
    job = yard.submit(source, "-o", yard.folder / "out.jsonl", "--timeout", "10s", *endless)
    yard.work_off()
    failed = yard.seen(job, Exit.FAILED)
    assert (failed["status"], failed["rq_status"]) == ("failed", "failed")
    assert "exceeded maximum timeout" in failed["errors"]["data"][0]["message"]
    assert failed["request_counts"]["completed"] == 1


@pytest.mark.long
def test_a_stopped_worker_hands_its_job_back(yard: BatchYard) -> None:
    target = yard.folder / "out.jsonl"
    job = yard.job([completion(number) for number in range(1_500)])
    worker = yard.work()
    eventually(lambda: target.exists() and target.stat().st_size > 0, timeout_s=60)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(ENDS_S) == 0
    waiting = yard.seen(job)
    assert (waiting["rq_status"], waiting["retries_left"]) == ("queued", 5)
    assert 0 < waiting["request_counts"]["completed"] < 1_500
    yard.work_off()
    assert yard.seen(job)["request_counts"] == {"total": 1500, "completed": 1500, "failed": 0}


@pytest.mark.long
def test_a_waiting_job_is_cancelled_and_resumed(yard: BatchYard) -> None:
    job = yard.job([completion(1), completion(2, max_tokens=-1)])
    assert yard.call("cancel", job).stdout == f"{job}: cancelled\n"
    assert yard.seen(job, Exit.FAILED)["status"] == "cancelled"
    yard.call("cancel", job)
    yard.work_off()
    assert not (yard.folder / "out.jsonl").exists()
    yard.call("resume", job)
    yard.call("resume", job, status=Exit.USAGE)
    yard.work_off()
    assert yard.seen(job)["status"] == "completed"
    ended = yard.call("cancel", job, status=Exit.FAILED)
    assert ended.stderr == f"Error: {job} had ended before: completed\n"
    refused = yard.call("resume", job, status=Exit.USAGE)
    assert "nothing to resume but 1 line with an error, with --retry-errors" in refused.stderr
    yard.call("resume", job, "--retry-errors")
    # And the audit has what was done, as from the board.
    assert [(one.role, one.action, one.target, one.text) for one in yard.audit()] == [
        (COMMAND_LINE, "batch.cancel", f"batch {job}", f"{job}: cancelled."),
        (COMMAND_LINE, "batch.cancel", f"batch {job}", f"{job}: cancelled."),
        (COMMAND_LINE, "batch.resume", f"batch {job}", f"{job} waits for a worker again."),
        (COMMAND_LINE, "batch.cancel", f"batch {job}", ""),  # refused
        (
            COMMAND_LINE,
            "batch.resume",
            f"batch {job}",
            f"{job} waits for a worker again, with its errors.",
        ),
    ]


def test_unknown_batch_job_is_an_error(valkey_broker: Server) -> None:
    yard = RqYard(valkey_broker.url)
    for command in ("status", "cancel", "resume", "results", "logs"):
        done = yard.call(command, "batch_nothing")
        assert done.exit_code == Exit.FAILED
        assert "there is no batch job 'batch_nothing'" in done.stderr


@pytest.mark.long
def test_a_script_can_submit_and_wait(yard: BatchYard) -> None:
    source = yard.write("in.jsonl", [completion(1)])
    target = yard.folder / "out.jsonl"
    job = submit_batch(source, target, redis_url=yard.plant.url, yard=yard.plant.keys.yard)
    with pytest.raises(WaitTimeout):
        job.wait(timeout_s=0.1)
    assert job.cancel() == "cancelled"
    job.resume()
    yard.work("--burst")
    assert job.wait(timeout_s=50)["status"] == "completed"
    assert job.cancel() == "completed"
    with pytest.raises(SettingsError, match=r"is completed: there is nothing to resume$"):
        job.resume(retry_errors=True)


@pytest.mark.long
def test_a_job_waits_for_its_predecessor(yard: BatchYard) -> None:
    # Given a job that reads another's output
    first = yard.submit(yard.write("a.jsonl", [completion(1)]), "-o", yard.folder / "a-out.jsonl")
    source = yard.write("b.jsonl", [completion(2)])
    second = yard.submit(source, "-o", yard.folder / "b-out.jsonl", "--after", first)
    assert yard.seen(second)["rq_status"] == "deferred"
    yard.work_off()
    assert yard.seen(first)["status"] == yard.seen(second)["status"] == "completed"
    refused = yard.call(
        "submit", source, "-o", yard.folder / "c", "--after", "no-such", status=Exit.USAGE
    )
    assert "there is no job 'no-such'" in refused.stderr


@pytest.mark.long
def test_an_impossible_job_fails_immediately_with_the_reason(yard: BatchYard) -> None:
    # Given a job whose input is missing when it runs, and a successor that waits for it
    source, job = yard.folder / "in.jsonl", yard.job([completion(1)])
    other = yard.submit(source, "-o", yard.folder / "other.jsonl", "--after", job)
    source.unlink()
    yard.work_off()
    failed = yard.seen(job, Exit.FAILED)
    assert (failed["status"], failed["rq_status"]) == ("failed", "failed")
    assert "No such file" in failed["errors"]["data"][0]["message"]
    assert yard.seen(other)["rq_status"] == "deferred"
    # If the input returns and the job is resumed, I expect both to complete.
    yard.write("in.jsonl", [completion(1)])
    yard.call("resume", job)
    yard.work_off()
    assert yard.seen(job)["status"] == yard.seen(other)["status"] == "completed"


class Heard(http.server.BaseHTTPRequestHandler):
    """Keeps the bodies of its requests; fails the first."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.send_response(500 if len(self.bodies) == 1 else 204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def listener() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A URL, and the bodies sent to it."""
    bodies: list[dict[str, Any]] = []
    handler = type("Handler", (Heard,), {"bodies": bodies})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/done", bodies
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_callbacks_get_the_end_of_a_job(
    yard: BatchYard, listener: tuple[str, list[dict[str, Any]]]
) -> None:
    url, bodies = listener
    source = yard.write("in.jsonl", [completion(1)])
    told = yard.folder / "told.json"
    script = yard.write("tell.py", [])
    script.write_text(
        "import os, pathlib, sys\n"
        "text = os.environ['TOKENYARD_BATCH_STATUS'] + ' ' + sys.stdin.read()\n"
        "pathlib.Path(sys.argv[1]).write_text(text)\n"
    )
    command = f"{sys.executable} {script} {told}"
    good = yard.submit(source, "-o", yard.folder / "a.jsonl", "--on-success", url)
    (yard.folder / "b.jsonl").write_text("precious\n")
    bad = yard.submit(source, "-o", yard.folder / "b.jsonl", "--on-failure", command)
    deaf = yard.submit(source, "-o", yard.folder / "c.jsonl", "--on-success", "/no/such/program")
    yard.work_off()
    # I expect a URL that fails once to be called again,
    assert [body["id"] for body in bodies] == [good, good]
    assert (bodies[1]["status"], bodies[1]["request_counts"]["completed"]) == ("completed", 1)
    # a command to run,
    status, _, text = told.read_text().partition(" ")
    assert (status, json.loads(text)["id"]) == ("failed", bad)
    # and a failed callback to change nothing.
    assert yard.seen(deaf)["status"] == "completed"


@pytest.mark.long
def test_a_job_starts_at_its_time(yard: BatchYard) -> None:
    source = yard.write("in.jsonl", [completion(1)])
    later = yard.submit(source, "-o", yard.folder / "later.jsonl", "--at", "+2h")
    # Given a job whose time has come, and one with a later time
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
    spec = BatchSpec(input=str(source), output=str(yard.folder / "now.jsonl"))
    now = yard.queue.enqueue(JobOrder(spec=spec), at=past).id
    yard.work_off()
    assert yard.seen(now)["status"] == "completed"
    assert yard.seen(later)["rq_status"] == "scheduled"
    assert yard.call("cancel", later).stdout == f"{later}: cancelled\n"


@pytest.mark.long
def test_a_schedule_submits_the_next_job(yard: BatchYard) -> None:
    source = yard.write("in.jsonl", [completion(1)])
    refused = yard.call(
        "submit", source, "-o", yard.folder / "o", "--cron", "0 2 * * *", status=Exit.USAGE
    )
    assert "a name with the time" in refused.stderr
    job = yard.submit(source, "-o", yard.folder / "out-%Y-%m-%d.jsonl", "--cron", "0 2 * * *")
    today = datetime.datetime.now().astimezone()
    [first] = json.loads(yard.call("list", "--json").stdout)
    assert first["cron"] == "0 2 * * *"
    assert first["output_file_id"] in {
        str(yard.folder / f"out-{today + datetime.timedelta(days=days):%Y-%m-%d}.jsonl")
        for days in (0, 1)
    }
    # If its time comes
    registry = yard.queue.rq.scheduled_job_registry
    yard.plant.connection.zadd(registry.key, {job: 1}, xx=True)
    yard.work_off()
    # I expect the job to complete, and the next one to wait for its time.
    assert yard.seen(job)["status"] == "completed"
    [successor] = registry.get_job_ids()
    assert successor.startswith(f"{job}-")


@pytest.mark.parametrize(
    "times",
    [("--at", "soon"), ("--at", "+99999999999d"), ("--at", "0001-01-01"), ("--cron", "never")],
)
def test_an_invalid_time_is_wrong_usage(
    valkey_broker: Server, write_lines: WriteLines, tmp_path: Path, times: tuple[str, str]
) -> None:
    source, target = write_lines("in.jsonl", [completion(1)]), tmp_path / "out-%d.jsonl"
    done = RqYard(valkey_broker.url).call("submit", source, "-o", target, *times)
    assert done.exit_code == Exit.USAGE
    assert times[1] in done.stderr
