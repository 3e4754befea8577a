"""A yard for a benchmark: embedded broker, coordinator, and a controller with its workers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import redis

from tokenyard.process.children import start_child, stop_child
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.protocol.control import Command, parse_command
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.yard.snapshot import YardView, read_yard

#: The embedded server, or the system's own.
ServerName = Literal["valkey", "redis"]
START_TIMEOUT_S = 300.0
STOP_S = 20.0
_POLL_S = 0.05
_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class ServingYard:
    """A serving yard."""

    url: str
    name: str
    pids: Mapping[str, Sequence[int]]

    def missing(self) -> int:
        """Number of its original processes that are gone, replaced or not."""
        return sum(_is_gone(pid) for group in self.pids.values() for pid in group)


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; this collects an ended child."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def end_in_order() -> None:
    """Make SIGTERM end this process like Ctrl-C, so that it stops its children first."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def server_named(name: ServerName) -> Path | None:
    """The program of a server; None for the embedded one. Raises `FileNotFoundError`."""
    if name == "valkey":
        return None
    found = shutil.which("redis-server")
    if found is None:
        raise FileNotFoundError("no redis-server on the PATH")
    return Path(found)


@contextmanager
def embedded_broker(server: ServerName = "valkey") -> Iterator[EmbeddedBroker]:
    """Run a server with an append-only file, synced every second."""
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        broker = EmbeddedBroker(Path(folder), server=server_named(server))
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


def simulated_yard(
    broker: EmbeddedBroker,
    name: str,
    workers: int,
    max_num_seqs: int,
    coordinator_options: Sequence[str] = (),
    worker_options: Sequence[str] = (),
) -> AbstractContextManager[ServingYard]:
    """Run a coordinator and simulated workers, of unlimited speed unless options limit it."""
    engine = ["--engine", "simulated", "--max-num-seqs", str(max_num_seqs), *worker_options]
    expected = ["--expect-workers", str(workers), *coordinator_options]
    return serving_yard(broker, name, workers, engine, expected)


def vllm_yard(
    broker: EmbeddedBroker,
    name: str,
    workers: int,
    model: Path,
    coordinator_options: Sequence[str] = (),
    worker_options: Sequence[str] = (),
) -> AbstractContextManager[ServingYard]:
    """Run a coordinator and vLLM workers that hold one model from the start."""
    expected = ["--expect-workers", str(workers), *coordinator_options]
    return serving_yard(broker, name, workers, ["--model", str(model), *worker_options], expected)


@contextmanager
def models_yard(
    broker: EmbeddedBroker,
    name: str,
    models: Path,
    *,
    max_model_wait_s: float,
    sleepers: int = 0,
) -> Iterator[ServingYard]:
    """Run a coordinator and one device whose processes are warm, without a model."""
    with _yard(
        broker,
        name,
        ["--max-model-wait-s", str(max_model_wait_s)],
        ["--models", str(models), "--slots", "1", "--sleepers", str(sleepers)],
        lambda view: view.leader is not None and _count(view, "warm") > sleepers,
    ) as yard:
        yield yard


@contextmanager
def serving_yard(
    broker: EmbeddedBroker,
    name: str,
    workers: int,
    worker_options: Sequence[str],
    coordinator_options: Sequence[str] = (),
) -> Iterator[ServingYard]:
    """Run a coordinator and workers that hold the model named by their options."""
    with _yard(
        broker,
        name,
        coordinator_options,
        ["--slots", str(workers), *worker_options],
        lambda view: view.leader is not None and view.ready_workers >= workers,
    ) as yard:
        yield yard


def _count(view: YardView, state: str) -> int:
    return sum(worker.state == state for worker in view.workers)


@contextmanager
def _yard(
    broker: EmbeddedBroker,
    name: str,
    coordinator_options: Sequence[str],
    worker_options: Sequence[str],
    is_up: Callable[[YardView], bool],
) -> Iterator[ServingYard]:
    shared = ["--redis-url", broker.url, "--yard", name]
    programs = {
        "coordinator": ["coordinator", *shared, *coordinator_options],
        "worker": ["worker", *shared, *worker_options],
    }
    with running_programs(programs) as watch:
        wait_until(broker.url, name, lambda view: watch.is_well() and is_up(view), START_TIMEOUT_S)
        worker = psutil.Process(watch.pids["worker"])
        yield ServingYard(
            broker.url,
            name,
            {
                "client": [os.getpid()],
                "coordinator": [watch.pids["coordinator"]],
                "workers": [worker.pid, *(one.pid for one in worker.children(recursive=True))],
                "broker": [broker.pid],
            },
        )


class Watch:
    """Detects programs that end early."""

    def __init__(self, processes: Mapping[str, subprocess.Popen[bytes]], folder: Path) -> None:
        self.pids = {name: process.pid for name, process in processes.items()}
        self._processes = processes
        self._folder = folder

    def is_well(self) -> bool:
        """Return True if all run; raises `ChildProcessError` with the end of a program's log."""
        for program, process in self._processes.items():
            if process.poll() is not None:
                log = (self._folder / f"{program}.log").read_text(errors="replace")
                raise ChildProcessError(
                    f"{program} ended with status {process.returncode}:\n{last_lines(log)}"
                )
        return True


@contextmanager
def running_programs(programs: Mapping[str, Sequence[str]]) -> Iterator[Watch]:
    """Run ``python -m WORDS`` for each of some programs by name, until the block ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenyard-bench-")))
        processes = {}
        for name, words in programs.items():
            process = start_child([sys.executable, "-m", *words], folder / f"{name}.log")
            stack.callback(stop_child, process, STOP_S)
            processes[name] = process
        yield Watch(processes, folder)


def last_lines(log: str) -> str:
    """The last lines of a log."""
    return "\n".join(log.splitlines()[-_LOG_LINES:])


def wait_until(
    url: str, name: str, is_so: Callable[[YardView], bool], timeout_s: float
) -> YardView:
    """Poll a yard until it is as expected; raises `TimeoutError` with its last state."""
    until = time.monotonic() + timeout_s
    with redis.Redis.from_url(url, socket_timeout=10.0) as connection:
        while not is_so(view := read_yard(Yard(connection, Keys(name), url))):
            if time.monotonic() > until:
                states = [(worker.worker, worker.state) for worker in view.workers]
                raise TimeoutError(f"the yard did not get there in {timeout_s:g} s: {states}")
            time.sleep(_POLL_S)
        return view


def read_commands(yard: ServingYard) -> list[tuple[int, Command]]:
    """All commands to controllers, each with its time in unix ms."""
    with redis.Redis.from_url(yard.url, socket_timeout=10.0) as connection:
        entries = connection.xrange(Keys(yard.name).control)
    found = [(int(entry.split(b"-")[0]), parse_command(fields)) for entry, fields in entries]
    return [(at_ms, command) for at_ms, command in found if command]
