"""`tokenyard batch run`, killed at any moment: in the end each line has one answer."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batch.conftest import STEADY, Job, WriteLines, bad, completion, objects
from tests.batch.running import batch, start
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.batch.files import read_lines
from tokenyard.batch.opening import open_job
from tokenyard.batch.state import BatchState, load_state
from tokenyard.process.program import Exit

LINES = 1_500
KILLS = 5


@pytest.fixture(scope="module")
def steady_plant(no_leftover_processes: None, valkey_broker: Server) -> Iterator[Plant]:
    """A yard slow enough that a test can kill a job midway."""
    with Plant(valkey_broker.url) as plant:
        plant.up(**STEADY)
        yield plant


def state_of(target: Path) -> BatchState:
    state = load_state(target.with_name(f"{target.name}.state"))
    assert state is not None
    return state


def bytes_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def ended_when_larger(process: subprocess.Popen[bytes], path: Path, size: int) -> int | None:
    """Wait until a file grows or its writer ends; the exit status if it has ended."""
    eventually(lambda: process.poll() is not None or bytes_of(path) > size, timeout_s=60.0)
    return process.poll()


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.parametrize(
    ("name", "options"), [("out.jsonl", ()), ("out.jsonl.gz", ()), ("out.jsonl", ("--ordered",))]
)
def test_a_repeatedly_killed_job_answers_each_line_once(
    steady_plant: Plant, write_lines: WriteLines, tmp_path: Path, name: str, options: tuple[str]
) -> None:
    # Given a job of many lines, some of them bad
    lines = [bad(n) if n % 50 == 7 else completion(n) for n in range(LINES)]
    source, target, log = write_lines("in.jsonl", lines), tmp_path / name, tmp_path / "log"
    arguments = ("run", source, "-o", target, "--max-in-flight", 64, *options)
    # If its process is killed after each write
    seen: set[str] = set()
    for _ in range(KILLS):
        process = start(steady_plant, log, *arguments)
        status = ended_when_larger(process, target, bytes_of(target) + random.randrange(20_000))
        process.kill()
        process.wait()
        # I expect no earlier whole line to be lost,
        if target.suffix != ".gz":
            whole = target.read_bytes().splitlines(keepends=True)
            now = {json.loads(line)["id"] for line in whole if line.endswith(b"\n")}
            assert seen <= now
            seen = now
        if status is not None:
            break
    done = batch(steady_plant, *arguments)
    assert done.returncode == Exit.OK, done.stderr + log.read_text()
    # and in the end one answer with the id of each line.
    bad_count = sum(1 for n in range(LINES) if n % 50 == 7)
    good_count = LINES - bad_count
    promise = f"completed: {LINES} input lines = {good_count} results + {bad_count} errors"
    assert promise in done.stdout
    state = state_of(target)
    results, errors = objects(target), objects(state.spec.errors_path)
    assert sorted(line["custom_id"] for line in results + errors) == sorted(
        line["custom_id"] for line in lines
    )
    assert len(results) == good_count
    if options:
        numbers = [int(line["id"].rpartition("_")[2]) for line in results]
        assert numbers == sorted(numbers)


@pytest.mark.long
@pytest.mark.crash
def test_an_accepted_line_is_not_run_again_after_a_kill(
    steady_plant: Plant, write_lines: WriteLines, tmp_path: Path
) -> None:
    # Given a job that was killed with requests in flight
    lines = [completion(number, max_tokens=50) for number in range(200)]
    source, target = write_lines("in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = ("run", source, "-o", target)
    process = start(steady_plant, tmp_path / "log", *arguments)
    ended_when_larger(process, target, 0)
    process.kill()
    process.wait()
    client = state_of(target).id
    accepted = [name for name in map(str, range(1, 201)) if steady_plant.ledger(name, client)]
    assert len(accepted) > target.read_bytes().count(b"\n")
    ledgers = eventually(lambda: all_over(steady_plant, client, accepted))
    # If it continues, I expect the answers of those requests.
    assert batch(steady_plant, *arguments).returncode == Exit.OK
    assert all_over(steady_plant, client, accepted) == ledgers


def all_over(plant: Plant, client: str, names: list[str]) -> dict[str, dict[str, str]] | None:
    """The ledgers of a client's requests, once all have ended."""
    ledgers = {name: plant.ledger(name, client) for name in names}
    states = {ledger.get("state") for ledger in ledgers.values()}
    return ledgers if states == {"completed"} else None


@pytest.mark.long
@pytest.mark.crash
def test_a_job_survives_the_death_of_a_worker(
    valkey_broker: Server, write_lines: WriteLines, tmp_path: Path
) -> None:
    with Plant(valkey_broker.url) as plant:
        worker = plant.up(**STEADY)
        source = write_lines("in.jsonl", [completion(number) for number in range(LINES)])
        target = tmp_path / "out.jsonl"
        process = start(plant, tmp_path / "log", "run", source, "-o", target)
        ended_when_larger(process, target, 10_000)
        for child in worker.children():
            child.kill()
        assert process.wait(60.0) == Exit.OK, (tmp_path / "log").read_text()
        assert len({line["custom_id"] for line in objects(target)}) == LINES


@pytest.mark.long
def test_ctrl_c_keeps_the_answers_and_prints_how_to_continue(
    steady_plant: Plant, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines("in.jsonl", [completion(number) for number in range(LINES)])
    target, log = tmp_path / "out.jsonl", tmp_path / "log"
    process = start(steady_plant, log, "run", source, "-o", target)
    ended_when_larger(process, target, 0)
    process.send_signal(signal.SIGINT)
    assert process.wait(60.0) == Exit.INTERRUPTED
    assert "the same command continues from here" in log.read_text()
    assert target.read_bytes().endswith(b"\n")
    done = batch(steady_plant, "run", source, "-o", target, "--json")
    assert done.returncode == Exit.OK, done.stderr
    job = json.loads(done.stdout)
    assert job["object"] == "batch"
    assert job["status"] == "completed"
    assert job["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}


def peak_mb(pid: int) -> list[float]:
    """The peak memory of a process in MB, as a list of one; empty after its end.

    `os.wait4` does not fit: it includes the memory of the process's parent before the exec.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")]


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(plant: Plant, tmp_path: Path) -> None:
    # Given a file of many lines
    source, count = tmp_path / "in.jsonl", 20_000
    with source.open("w") as file:
        for number in range(count):
            file.write(json.dumps(completion(number)) + "\n")
    # If the job runs
    process = start(plant, tmp_path / "log", "run", source, "-o", tmp_path / "out.jsonl")
    peaks_mb = [0.0]
    while process.poll() is None:
        peaks_mb += peak_mb(process.pid)
        time.sleep(0.02)
    assert process.returncode == Exit.OK, (tmp_path / "log").read_text()
    assert sum(1 for _ in read_lines(tmp_path / "out.jsonl")) == count
    # I expect its process to stay small: most of the bound is Python and its libraries.
    assert 0 < max(peaks_mb) < 90


def test_a_window_may_begin_before_the_job(job: Job) -> None:
    spec = job.spec([completion(1)], completion_window_s=60.0, window_from=1000.0)
    with open_job(spec) as opened:
        assert opened.state.expires_at == 1060.0
