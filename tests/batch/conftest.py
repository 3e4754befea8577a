"""A simulated yard shared by the tests of batch jobs, and files for it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.batch.running import batch, start
from tests.support.builders import random_name
from tests.support.processes import Plant
from tests.support.servers import Server
from tokenyard.batch import BatchState, run_batch
from tokenyard.batch.files import member, read_lines
from tokenyard.batch.rq import work
from tokenyard.batch.rq.jobs import BatchQueue, JobOrder, KnownJob
from tokenyard.batch.rq.work import WorkerContext
from tokenyard.batch.rq.worker import BatchWorker
from tokenyard.batch.state import BatchSpec
from tokenyard.broker.connection import open_connection
from tokenyard.cli import main
from tokenyard.ops.audit import AuditEntry, read_audit
from tokenyard.process.program import Exit

#: zstandard may be missing here, but not on a CI machine.
zstd = pytest.mark.skipif(
    importlib.util.find_spec("zstandard") is None and os.environ.get("CI") != "true",
    reason="zstandard is not installed, so nothing was tested with .zst files",
)
ENDS_S = 60.0
#: A worker slow enough that a test can kill a job midway.
STEADY: dict[str, object] = {"simulated_step_s": 0.01, "max_num_seqs": 16}
Lines = Sequence[dict[str, Any] | str]
WriteLines = Callable[[str, Lines], Path]


@pytest.fixture(scope="session")
def plant(no_leftover_processes: None, valkey_broker: Server) -> Iterator[Plant]:
    """A yard with a coordinator and a worker that answers immediately."""
    with Plant(valkey_broker.url) as plant:
        plant.up()
        yield plant


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    """A function that writes a batch file, compressed according to its name."""

    def write(name: str, lines: Lines) -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_bytes(member(path, "".join(f"{text}\n" for text in texts).encode()))
        return path

    return write


def completion(number: int, **body: Any) -> dict[str, Any]:
    """A line in OpenAI's form."""
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"prompt {number}", "max_tokens": 4, **body},
    }


def objects(path: Path) -> list[dict[str, Any]]:
    """All lines of an output file."""
    return [json.loads(raw) for _, raw in read_lines(path) if raw is not None]


def bad(number: int) -> dict[str, Any]:
    """A line that is refused."""
    return completion(number, temperature=-1)


def invoke(url: str, yard: str, *words: object) -> Result:
    """Run `tokenyard batch ...` in this process."""
    place = ["--redis-url", url, "--yard", yard, "batch"]
    return CliRunner().invoke(main, [*place, *map(str, words)])


class Job:
    """The files of a job that a test runs itself, once or more."""

    def __init__(self, plant: Plant, write: WriteLines, target: Path) -> None:
        self._write = write
        self.place = {"redis_url": plant.url, "yard": plant.keys.yard}
        self.source = target.with_name("in.jsonl")
        self.target = target

    @property
    def errors(self) -> Path:
        """The file of errors."""
        return self.target.with_name(self.target.name.replace("out.", "out.errors."))

    def write(self, lines: Lines) -> Path:
        """Write its input."""
        return self._write(self.source.name, lines)

    def spec(self, lines: Lines, **options: Any) -> BatchSpec:
        """Write its input; what a runner is to do."""
        return BatchSpec(input=str(self.write(lines)), output=str(self.target), **options)

    def run(self, lines: Lines | None = None, **options: Any) -> BatchState:
        """Run it, with other lines than before if they are given."""
        if lines is not None:
            self.write(lines)
        return run_batch(self.source, self.target, **self.place, **options)

    def call(self, *words: object) -> Result:
        """Run `tokenyard batch ...` on its yard."""
        return invoke(self.place["redis_url"], self.place["yard"], *words)

    def answered(self) -> list[dict[str, Any]]:
        """The lines of its output."""
        return objects(self.target)


@pytest.fixture
def job(plant: Plant, write_lines: WriteLines, tmp_path: Path) -> Job:
    """A job on the shared yard."""
    return Job(plant, write_lines, tmp_path / "out.jsonl")


class RqYard:
    """A yard of which there is nothing but its queue at RQ."""

    def __init__(self, url: str) -> None:
        self.url, self.yard = url, random_name("yard")
        self.connection = open_connection(url)
        self.queue = BatchQueue(self.connection, self.yard)

    def enqueue(self, **options: Any) -> KnownJob:
        """Enqueue a job of this specification."""
        spec = BatchSpec(**({"input": "/in", "output": "/out"} | options))
        return self.queue.enqueue(JobOrder(spec=spec))

    def given(self, spec: BatchSpec, patch: pytest.MonkeyPatch) -> KnownJob:
        """A job of this specification that RQ has given to this process."""
        job = self.queue.find(self.queue.enqueue(JobOrder(spec=spec)).id)
        patch.setattr(WorkerContext, "url", self.url)
        patch.setattr(WorkerContext, "yard", self.yard)
        patch.setattr(work, "get_current_job", lambda: job)
        return job

    def worker(self, name: str = "") -> BatchWorker:
        """A batch worker in this process."""
        return BatchWorker(self.url, self.yard, self.connection, name)

    def call(self, *words: object) -> Result:
        """Run `tokenyard batch ...`."""
        return invoke(self.url, self.yard, *words)


@pytest.fixture
def worker_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a batch worker in this process tells its jobs."""
    for name in ("url", "yard"):
        monkeypatch.setattr(WorkerContext, name, "")


class BatchYard:
    """A yard with its own server, since RQ's keys are outside the yard's names."""

    def __init__(self, plant: Plant, folder: Path, write: WriteLines) -> None:
        self.plant = plant
        self.folder = folder
        self.write = write
        self.queue = BatchQueue(plant.connection, plant.keys.yard)
        self._workers: list[subprocess.Popen[bytes]] = []

    def call(self, *arguments: object, status: int = Exit.OK) -> subprocess.CompletedProcess[str]:
        """Run `tokenyard batch ...`, and expect success or a given status."""
        done = batch(self.plant, *arguments)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def submit(self, *arguments: object) -> str:
        """Submit a job; its id."""
        return self.call("submit", *arguments).stdout.strip()

    def job(self, lines: Lines, *options: object) -> str:
        """Submit a job of these lines, from `in.jsonl` to `out.jsonl`; its id."""
        source = self.write("in.jsonl", lines)
        return self.submit(source, "-o", self.folder / "out.jsonl", *options)

    def seen(self, job: str, status: int = Exit.OK) -> dict[str, Any]:
        """A job as `status` shows it."""
        found: dict[str, Any] = json.loads(self.call("status", job, "--json", status=status).stdout)
        return found

    def ended(self, job: str) -> dict[str, Any]:
        """Wait for the end of a job; how `status` shows it."""
        waiting = ("status", job, "--wait", "--timeout", 50, "--json")
        found: dict[str, Any] = json.loads(self.call(*waiting).stdout)
        return found

    def audit(self) -> Sequence[AuditEntry]:
        """The audit of the yard, the oldest first."""
        return read_audit(self.plant)[::-1]

    def work(self, *arguments: object, program: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a `tokenyard batch worker`, which is killed after the test.

        A ``program`` of the tests, a module and its own words, starts it in its way.
        """
        log = self.folder / f"worker-{len(self._workers)}.log"
        self._workers.append(start(self.plant, log, "worker", *arguments, program=program))
        return self._workers[-1]

    @property
    def log(self) -> str:
        """What the last worker has printed."""
        return (self.folder / f"worker-{len(self._workers) - 1}.log").read_text()

    def work_off(self) -> None:
        """Let a worker run all jobs that wait."""
        assert self.work("--burst").wait(ENDS_S) == 0

    def end(self) -> None:
        """Kill the workers, and show their logs."""
        for process in self._workers:
            process.kill()
            process.wait()
        for log in sorted(self.folder.glob("worker-*.log")):
            sys.stderr.write(f"--- {log.name}\n{log.read_text()[-4000:]}\n")


@pytest.fixture
def yard(
    new_server: Callable[..., Server], write_lines: WriteLines, tmp_path: Path
) -> Iterator[BatchYard]:
    """A yard that answers; its workers of RQ are started by the tests."""
    with Plant(new_server("valkey", aof=False).url) as plant:
        plant.up(**STEADY)
        made = BatchYard(plant, tmp_path, write_lines)
        yield made
        made.end()
