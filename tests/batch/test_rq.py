"""Batch jobs under RQ: each command, on a live yard."""

from __future__ import annotations

import datetime
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import rq

from tests.batch.conftest import WriteLines, completion, objects
from tests.batch.running import batch, start
from tests.cli.running import environment
from tests.support.processes import Plant, is_gone
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.batch import submit_batch
from tokenyard.batch.rq.jobs import BatchQueue, JobOrder
from tokenyard.batch.state import BatchSpec
from tokenyard.process.program import Exit
from tokenyard.protocol.errors import WaitTimeout

Batch = Callable[..., subprocess.CompletedProcess[str]]
ENDS_S = 60.0


@pytest.fixture
def rq_plant(new_server: Callable[..., Server]) -> Iterator[Plant]:
    """A yard on its own server, since RQ's keys are outside the yard's names."""
    with Plant(new_server("valkey", aof=False).url) as plant:
        plant.coordinator()
        plant.worker(simulated_step_s=0.002, max_num_seqs=16)
        plant.wait_for_workers(1)
        yield plant


@pytest.fixture
def call(rq_plant: Plant) -> Batch:
    """A function that runs `tokenyard batch ...` and expects success or a given status."""

    def run(*arguments: object, status: int = Exit.OK) -> subprocess.CompletedProcess[str]:
        done = batch(rq_plant, *arguments)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def work(rq_plant: Plant, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A function that starts a `tokenyard batch worker`, which is killed after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: object) -> subprocess.Popen[bytes]:
        log = tmp_path / f"worker-{len(started)}.log"
        started.append(start(rq_plant, log, "worker", *arguments))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
    for log in sorted(tmp_path.glob("worker-*.log")):
        sys.stderr.write(f"--- {log.name}\n{log.read_text()[-4000:]}\n")


def seen(call: Batch, job: str, status: int = Exit.OK) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call("status", job, "--json", status=status).stdout)
    return found


def submitted(call: Batch, *arguments: object) -> str:
    return call("submit", *arguments).stdout.strip()


def test_a_submitted_job_is_run_and_read_without_pickles(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    rq_plant: Plant,
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    lines = [completion(number) for number in range(100)] + ["{broken"]
    job = submitted(call, write_lines("in.jsonl", lines), "-o", tmp_path / "out.jsonl.gz")
    # Given a waiting job
    waiting = seen(call, job)
    assert (waiting["status"], waiting["rq_status"]) == ("validating", "queued")
    # If a worker takes it
    assert work("--burst").wait(ENDS_S) == 0
    # I expect every command to show it as completed.
    done = seen(call, job)
    assert (done["object"], done["status"], done["rq_status"]) == ("batch", "completed", "finished")
    assert done["request_counts"] == {"total": 101, "completed": 100, "failed": 1}
    assert done["created_at"] <= done["in_progress_at"] <= done["completed_at"]
    assert "101" in call("status", job).stdout
    assert job in call("list").stdout
    [listed] = json.loads(call("list", "--json").stdout)
    assert listed["id"] == job
    results = [json.loads(line) for line in call("results", job).stdout.splitlines()]
    assert len(results) == 100
    [error] = [json.loads(line) for line in call("results", job, "--errors").stdout.splitlines()]
    assert error["error"]["line"] == 101
    assert call("results", job, "--path").stdout.strip() == str(tmp_path / "out.jsonl.gz")
    assert "101 input lines = 100 results + 1 errors" in call("logs", job).stdout
    # RQ holds no pickle.
    assert_no_pickle(rq_plant.connection)
    # RQ's own tools read the job.
    queue = BatchQueue(rq_plant.connection, rq_plant.keys.yard)
    assert queue.find(job).get_meta()["request_counts"]["completed"] == 100
    info = subprocess.run(
        [sys.executable, "-m", "rq.cli", "info", "--url", rq_plant.url, "--raw"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert queue.rq.name in info.stdout


def assert_no_pickle(connection: redis.Redis) -> None:
    keys = [key for key in connection.scan_iter("rq:*") if connection.type(key) == b"hash"]
    values = {key: connection.hvals(key) for key in keys}
    assert any(values.values())
    for key, found in values.items():
        assert not [value for value in found if value.startswith(b"\x80")], key


def test_the_job_of_a_killed_worker_continues_immediately(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    lines = 1_500
    source = write_lines("in.jsonl", [completion(number) for number in range(lines)])
    target = tmp_path / "out.jsonl"
    job = submitted(call, source, "-o", target, "--max-in-flight", 64)
    # If the job's worker is killed three times
    for _ in range(3):
        worker = work()
        size = target.stat().st_size if target.exists() else 0
        eventually(lambda size=size: target.exists() and target.stat().st_size > size, timeout_s=60)
        family = [each.pid for each in psutil.Process(worker.pid).children(recursive=True)]
        worker.kill()
        worker.wait()
        # I expect its children to end with it,
        eventually(lambda family=family: all(map(is_gone, family)))
    work()
    done = json.loads(call("status", job, "--wait", "--timeout", 50, "--json").stdout)
    # and each line to have one answer.
    assert done["status"] == "completed"
    assert sorted(line["custom_id"] for line in objects(target)) == sorted(
        f"line-{number}" for number in range(lines)
    )


def test_a_job_whose_process_is_killed_continues(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    rq_plant: Plant,
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    source = write_lines("in.jsonl", [completion(number) for number in range(1_500)])
    target = tmp_path / "out.jsonl"
    job = submitted(call, source, "-o", target)
    work()
    eventually(lambda: target.exists() and target.stat().st_size > 0, timeout_s=60)
    # If only the job's process is killed, as by the kernel for its memory
    queue = BatchQueue(rq_plant.connection, rq_plant.keys.yard)
    [worker] = rq.Worker.all(queue=queue.rq)
    horses = [each for each in psutil.Process(worker.pid).children() if _is_horse(each)]
    [horse] = horses
    horse.kill()
    # I expect the worker to continue the job.
    done = json.loads(call("status", job, "--wait", "--timeout", 50, "--json").stdout)
    assert done["request_counts"] == {"total": 1500, "completed": 1500, "failed": 0}


def _is_horse(process: psutil.Process) -> bool:
    """Whether a process leads its group, as a job's process does, but not RQ's scheduler."""
    return os.getpgid(process.pid) == process.pid


def test_a_try_that_exceeds_its_time_is_the_last(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    source = write_lines("in.jsonl", [completion(1), completion(2, max_tokens=8000)])
    job = submitted(call, source, "-o", tmp_path / "out.jsonl", "--timeout", "2s")
    assert work("--burst").wait(ENDS_S) == 0
    failed = seen(call, job, Exit.FAILED)
    assert (failed["status"], failed["rq_status"]) == ("failed", "failed")
    assert "exceeded maximum timeout" in failed["errors"]["data"][0]["message"]
    assert failed["request_counts"]["completed"] == 1


def test_a_stopped_worker_hands_its_job_back(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    source = write_lines("in.jsonl", [completion(number) for number in range(1_500)])
    target = tmp_path / "out.jsonl"
    job = submitted(call, source, "-o", target)
    worker = work()
    eventually(lambda: target.exists() and target.stat().st_size > 0, timeout_s=60)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(ENDS_S) == 0
    waiting = seen(call, job)
    assert (waiting["rq_status"], waiting["retries_left"]) == ("queued", 5)
    assert 0 < waiting["request_counts"]["completed"] < 1_500
    work("--burst").wait(ENDS_S)
    assert seen(call, job)["request_counts"] == {"total": 1500, "completed": 1500, "failed": 0}


def test_a_waiting_job_is_cancelled_and_resumed(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    job = submitted(call, source, "-o", tmp_path / "out.jsonl")
    assert call("cancel", job).stdout == f"{job}: cancelled\n"
    assert seen(call, job, Exit.FAILED)["status"] == "cancelled"
    assert work("--burst").wait(ENDS_S) == 0
    assert not (tmp_path / "out.jsonl").exists()
    call("resume", job)
    assert work("--burst").wait(ENDS_S) == 0
    assert seen(call, job)["status"] == "completed"
    assert call("cancel", job, status=Exit.FAILED).stdout == f"{job}: completed\n"


def test_a_cancelled_running_job_answers_every_line(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    # Given an endless job
    lines = [completion(number, max_tokens=100_000) for number in range(5)]
    source = write_lines("in.jsonl", [completion(99), *lines])
    job = submitted(call, source, "-o", tmp_path / "out.jsonl", "--param", "ignore_eos=true")
    work()
    eventually(
        lambda: (tmp_path / "out.jsonl").exists() and objects(tmp_path / "out.jsonl"), timeout_s=60
    )
    # If it is cancelled
    assert call("cancel", job).stdout == f"{job}: cancelling\n"
    call("status", job, "--wait", "--timeout", 50, status=Exit.FAILED)
    # I expect an answer for each line, and a failed job in RQ.
    ended = seen(call, job, Exit.FAILED)
    assert (ended["status"], ended["rq_status"]) == ("cancelled", "failed")
    assert ended["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
    errors = [json.loads(line) for line in call("results", job, "--errors").stdout.splitlines()]
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


def test_unknown_batch_job_is_an_error(call: Batch) -> None:
    for command in ("status", "cancel", "resume", "results", "logs"):
        done = call(command, "batch_nothing", status=Exit.FAILED)
        assert "there is no batch job 'batch_nothing'" in done.stderr


def test_a_script_can_submit_and_wait(
    rq_plant: Plant,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    target = tmp_path / "out.jsonl"
    job = submit_batch(source, target, redis_url=rq_plant.url, yard=rq_plant.keys.yard)
    with pytest.raises(WaitTimeout):
        job.wait(timeout_s=0.1)
    assert job.cancel() == "cancelled"
    job.resume()
    work("--burst")
    assert job.wait(timeout_s=50)["status"] == "completed"
    assert job.cancel() == "completed"


def test_a_job_waits_for_its_predecessor(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    # Given a job that reads another's output
    first = submitted(call, write_lines("a.jsonl", [completion(1)]), "-o", tmp_path / "a-out.jsonl")
    source = write_lines("b.jsonl", [completion(2)])
    second = submitted(call, source, "-o", tmp_path / "b-out.jsonl", "--after", first)
    assert seen(call, second)["rq_status"] == "deferred"
    assert work("--burst").wait(ENDS_S) == 0
    assert seen(call, first)["status"] == seen(call, second)["status"] == "completed"
    refused = call("submit", source, "-o", tmp_path / "c", "--after", "no-such", status=Exit.USAGE)
    assert "there is no job 'no-such'" in refused.stderr


def test_an_impossible_job_fails_immediately_with_the_reason(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    # Given a job whose input is missing when it runs, and a successor that waits for it
    source = write_lines("in.jsonl", [completion(1)])
    job = submitted(call, source, "-o", tmp_path / "out.jsonl")
    other = submitted(call, source, "-o", tmp_path / "other.jsonl", "--after", job)
    source.unlink()
    assert work("--burst").wait(ENDS_S) == 0
    failed = seen(call, job, Exit.FAILED)
    assert (failed["status"], failed["rq_status"]) == ("failed", "failed")
    assert "No such file" in failed["errors"]["data"][0]["message"]
    assert seen(call, other)["rq_status"] == "deferred"
    # If the input returns and the job is resumed, I expect both to complete.
    write_lines("in.jsonl", [completion(1)])
    call("resume", job)
    assert work("--burst").wait(ENDS_S) == 0
    assert seen(call, job)["status"] == seen(call, other)["status"] == "completed"


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


def test_callbacks_get_the_end_of_a_job(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    write_lines: WriteLines,
    tmp_path: Path,
    listener: tuple[str, list[dict[str, Any]]],
) -> None:
    url, bodies = listener
    source = write_lines("in.jsonl", [completion(1)])
    told = tmp_path / "told.json"
    script = write_lines("tell.py", [])
    script.write_text(
        "import os, pathlib, sys\n"
        "text = os.environ['TOKENYARD_BATCH_STATUS'] + ' ' + sys.stdin.read()\n"
        "pathlib.Path(sys.argv[1]).write_text(text)\n"
    )
    command = f"{sys.executable} {script} {told}"
    good = submitted(call, source, "-o", tmp_path / "a.jsonl", "--on-success", url)
    (tmp_path / "b.jsonl").write_text("precious\n")
    bad = submitted(call, source, "-o", tmp_path / "b.jsonl", "--on-failure", command)
    deaf = submitted(call, source, "-o", tmp_path / "c.jsonl", "--on-success", "/no/such/program")
    assert work("--burst").wait(ENDS_S) == 0
    # I expect a URL that fails once to be called again,
    assert [body["id"] for body in bodies] == [good, good]
    assert (bodies[1]["status"], bodies[1]["request_counts"]["completed"]) == ("completed", 1)
    # a command to run,
    status, _, text = told.read_text().partition(" ")
    assert (status, json.loads(text)["id"]) == ("failed", bad)
    # and a failed callback to change nothing.
    assert seen(call, deaf)["status"] == "completed"


def test_a_job_starts_at_its_time(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    rq_plant: Plant,
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    later = submitted(call, source, "-o", tmp_path / "later.jsonl", "--at", "+2h")
    # Given a job whose time has come, and one with a later time
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
    spec = BatchSpec(input=str(source), output=str(tmp_path / "now.jsonl"))
    queue = BatchQueue(rq_plant.connection, rq_plant.keys.yard)
    now = queue.enqueue(JobOrder(spec=spec), at=past).id
    assert work("--burst").wait(ENDS_S) == 0
    assert seen(call, now)["status"] == "completed"
    assert seen(call, later)["rq_status"] == "scheduled"
    assert call("cancel", later).stdout == f"{later}: cancelled\n"


def test_a_schedule_submits_the_next_job(
    call: Batch,
    work: Callable[..., subprocess.Popen[bytes]],
    rq_plant: Plant,
    write_lines: WriteLines,
    tmp_path: Path,
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    refused = call("submit", source, "-o", tmp_path / "o", "--cron", "0 2 * * *", status=Exit.USAGE)
    assert "a name with the time" in refused.stderr
    job = submitted(call, source, "-o", tmp_path / "out-%Y.jsonl", "--cron", "0 2 * * *")
    year = datetime.datetime.now().astimezone().year
    [first] = json.loads(call("list", "--json").stdout)
    assert first["cron"] == "0 2 * * *"
    assert first["output_file_id"] in {str(tmp_path / f"out-{y}.jsonl") for y in (year, year + 1)}
    # If its time comes
    queue = BatchQueue(rq_plant.connection, rq_plant.keys.yard)
    registry = queue.rq.scheduled_job_registry
    rq_plant.connection.zadd(registry.key, {job: 1}, xx=True)
    assert work("--burst").wait(ENDS_S) == 0
    # I expect the job to complete, and the next one to wait for its time.
    assert seen(call, job)["status"] == "completed"
    [successor] = registry.get_job_ids()
    assert successor.startswith(f"{job}-")


@pytest.mark.parametrize("times", [("--at", "soon"), ("--cron", "never")])
def test_an_invalid_time_is_wrong_usage(
    call: Batch, write_lines: WriteLines, tmp_path: Path, times: tuple[str, str]
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    done = call("submit", source, "-o", tmp_path / "out-%d.jsonl", *times, status=Exit.USAGE)
    assert times[1] in done.stderr
