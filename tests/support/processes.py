"""A running yard: real `python -m coordinator` and `python -m worker` processes on loopback.

`Plant` is a context manager that kills all remaining processes at the end of the test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import redis

from tests.support.builders import make_request, random_name
from tests.support.waiting import eventually
from tests.support.zygote import FORKED, Forked, the_zygote
from tokenyard.protocol.keys import Keys, PriorityClass
from tokenyard.protocol.replies import (
    Delta,
    Reply,
    Result,
    decode_replies,
    decode_reply,
    to_delta,
    to_result,
)
from tokenyard.protocol.wire import Request, SamplingParams, request_fields
from tokenyard.protocol.worker_info import WorkerInfo, decode_worker
from tokenyard.scripts import Scripts

ROOT = Path(__file__).parents[2]
START_S = 60.0
ANSWER_S = 60.0


class Program:
    """A started program and its log."""

    def __init__(self, module: str, options: Mapping[str, object], log: Path) -> None:
        self.log_path = log
        self._process = self._start(module, as_words(options))
        self.pid = self._process.pid

    def _start(self, module: str, words: list[str]) -> subprocess.Popen[bytes] | Forked:
        if module in FORKED:
            return the_zygote().start(module, words, self.log_path)
        with self.log_path.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def log(self) -> str:
        """The log so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the program still runs."""
        return self._process.poll() is None

    def children(self) -> list[psutil.Process]:
        """The worker processes, which are children of the program's fork-server."""
        with contextlib.suppress(psutil.NoSuchProcess):
            helpers = psutil.Process(self.pid).children()
            return [worker for helper in helpers for worker in helper.children()]
        return []

    def fork_server(self) -> psutil.Process:
        """The process that starts the worker processes."""
        (found,) = (one for one in psutil.Process(self.pid).children() if _is_fork_server(one))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send the program a signal."""
        self._process.send_signal(number)

    def suspend(self) -> list[psutil.Process]:
        """Suspend the program and its workers; which they are, in this order."""
        processes = [psutil.Process(self.pid), *self.children()]
        for process in processes:
            process.suspend()
        return processes

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for the end of the program; its exit status."""
        return self._process.wait(timeout_s)

    def stop(self, timeout_s: float = START_S) -> int:
        """Send SIGTERM; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """Send SIGKILL to the program, not to its children."""
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        """Kill the program and its children, also suspended ones."""
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid).children(recursive=True)
            children = [child for child in found if not _is_tracker(child)]
        for pid in (self.pid, *(child.pid for child in children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        eventually(lambda: all(is_gone(child.pid) for child in children))


def as_words(options: Mapping[str, object]) -> list[str]:
    """Options as they are given on a command line."""
    words = []
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return words


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("resource_tracker" in part for part in process.cmdline())
    return True


def _is_fork_server(process: psutil.Process) -> bool:
    return any("multiprocessing.forkserver" in part for part in process.cmdline())


@dataclass(frozen=True, slots=True)
class Answer:
    """All published entries of one request, in order."""

    deltas: list[Delta]
    results: list[Result]

    @property
    def result(self) -> Result:
        """The only result."""
        (result,) = self.results
        return result

    def check_stream(self) -> None:
        """Check that the deltas have every token of the result once."""
        seen: list[int] = []
        for delta in self.deltas:
            assert delta.seq == len(seen), f"delta at {delta.seq} behind {len(seen)} tokens"
            seen += delta.tokens
        assert self.result.seq == len(seen)
        assert self.result.tokens[: len(seen)] == seen


class Plant:
    """One yard with its processes, and short ways to use it as a client."""

    def __init__(self, url: str, yard: str = "") -> None:
        self.url = url
        self.keys = Keys(yard or random_name("yard"))
        self.connection = redis.Redis.from_url(url, socket_timeout=30.0)
        self.scripts = Scripts(self)
        self.programs: list[Program] = []
        self._folder = tempfile.TemporaryDirectory(prefix="plant-")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for program in self.programs:
            program.end()
            # pytest shows it if the test has failed.
            sys.stderr.write(f"--- {program.log_path.name}\n{program.log[-6000:]}\n")
        self.connection.close()
        self._folder.cleanup()

    # Processes

    def _start(
        self, module: str, options: Mapping[str, object], start: type[Program] | None = None
    ) -> Program:
        log = Path(self._folder.name) / f"{len(self.programs)}-{module}.log"
        known = {"redis_url": self.url, "yard": self.keys.yard}
        program = (start or Program)(module, {**known, **options}, log)
        self.programs.append(program)
        return program

    def coordinator(self, **options: object) -> Program:
        """Start a coordinator; `wait_for_leader` returns once it leads."""
        return self._start("coordinator", options)

    def worker(self, **options: object) -> Program:
        """Start a controller with simulated engines; see `wait_for_workers`."""
        defaults: dict[str, object] = {"engine": "simulated", "model_name": "sim", "name": "w"}
        return self._start("worker", {**defaults, "backoff_s": 0.1, **options})

    def up(self, **options: object) -> Program:
        """Start a coordinator and a controller; the controller, once all its workers serve."""
        self.coordinator()
        controller = self.worker(**options)
        self.wait_for_workers(int(str(options.get("slots", 1))))
        return controller

    def write(self, name: str, text: str) -> Path:
        """Write a file that exists as long as the yard."""
        path = Path(self._folder.name) / name
        path.write_text(text)
        return path

    def host(self, models: Path, **options: object) -> Program:
        """Start a controller that may load the models of a file, with simulated engines."""
        defaults: dict[str, object] = {"engine": "simulated", "models": models, "name": "host"}
        return self._start("worker", {**defaults, "backoff_s": 0.1, **options})

    def wait_for_leader(self, other_than: bytes | None = None) -> bytes:
        """Wait for a leader; its token."""

        def leader() -> bytes | None:
            token: bytes | None = self.connection.get(self.keys.leader)
            return token if token != other_than else None

        return eventually(leader, timeout_s=START_S)

    def wait_for_workers(self, count: int) -> dict[str, WorkerInfo]:
        """Wait until so many workers are ready and known to a leader, if any; the roster."""

        def ready() -> dict[str, WorkerInfo] | None:
            found = self.roster()
            serving = {worker: info for worker, info in found.items() if info.state == "ready"}
            return serving if len(serving) == count else None

        workers = eventually(ready, timeout_s=START_S)
        eventually(lambda: self._are_known(workers), timeout_s=START_S)
        return workers

    def _are_known(self, workers: Iterable[str]) -> bool:
        """Whether the leader, if there is one, has these in its roster; its log says so."""
        token = self.connection.get(self.keys.leader)
        if token is None:
            return True
        logs = (program.log for program in self.programs)
        (log,) = (one for one in logs if f"leads as {token.decode()}" in one)
        return all(f"{worker} serves " in log for worker in workers)

    def end_leases(self, host: str) -> None:
        """Have the leases end of all workers of a host that the test has stopped or killed."""
        theirs = [worker for worker, info in self.roster().items() if info.controller == host]
        self.connection.zadd(self.keys.leases, dict.fromkeys(theirs, 1), xx=True)

    def end_lead(self) -> None:
        """Have the lease end of a leader that the test has killed."""
        self.connection.delete(self.keys.leader)

    # Looking

    def roster(self) -> dict[str, WorkerInfo]:
        """The roster entries of workers that hold a lease."""
        leases = dict(self.connection.zrange(self.keys.leases, 0, -1, withscores=True))
        entries = self.connection.hgetall(self.keys.workers)
        return {
            worker.decode(): decode_worker(packed)
            for worker, packed in entries.items()
            if leases.get(worker, 0) > 0
        }

    def ledger(self, request_id: str, client: str = "anon") -> dict[str, str]:
        """The ledger of a request without its result."""
        fields = self.connection.hgetall(self.keys.ledger(client, request_id))
        fields.pop(b"result", None)
        return {name.decode(): value.decode() for name, value in fields.items()}

    def replies(self, request_id: str, client: str = "anon") -> list[Reply]:
        """All entries of a request's own reply stream."""
        entries = self.connection.xrange(self.keys.reply(client, request_id))
        return [reply for _, fields in entries for reply in decode_replies(fields)]

    def answer(self, request_id: str, client: str = "anon") -> Answer:
        """The published entries of a request, as a client reads them."""
        replies = self.replies(request_id, client)
        return Answer(
            [to_delta(reply) for reply in replies if reply.event == "delta"],
            [to_result(reply) for reply in replies if reply.event == "result"],
        )

    def published(self, request_id: str, client: str = "anon") -> int:
        """The number of published tokens of a running request."""
        return int(self.connection.strlen(self.keys.tokens(client, request_id))) // 4

    # Submitting

    def push(self, request: Request, priority_class: PriorityClass = "normal") -> None:
        """Submit by a plain XADD."""
        fields = dict(request_fields(request))
        self.connection.xadd(self.keys.intake(priority_class), fields)

    def push_all(
        self, requests: Sequence[Request], priority_class: PriorityClass = "normal"
    ) -> None:
        """Submit several in one transaction, in order."""
        pipeline = self.connection.pipeline(transaction=True)
        for request in requests:
            fields = dict(request_fields(request))
            pipeline.xadd(self.keys.intake(priority_class), fields)
        pipeline.execute()

    def result(self, request_id: str, client: str = "anon", timeout_s: float = ANSWER_S) -> Result:
        """Wait for the result in the ledger."""
        ledger = self.keys.ledger(client, request_id)
        packed: bytes = eventually(
            lambda: self.connection.hget(ledger, "result"), timeout_s=timeout_s
        )
        return to_result(decode_reply(packed))

    def results(self, requests: Sequence[Request], timeout_s: float = ANSWER_S) -> list[Result]:
        """Wait for the results of several requests, in their order."""
        return [self.result(request.id, request.client, timeout_s) for request in requests]

    def wait_for_turns(self, *names: str, model: str = "") -> None:
        """Push short requests until each of these workers has served one: the leader knows it.

        A roster entry is not enough, because the leader reads the roster only now and then.
        """
        params = SamplingParams(max_tokens=1)

        def served() -> set[str]:
            requests = [make_request(model=model, params=params) for _ in names]
            self.push_all(requests)
            origins = (result.provenance for result in self.results(requests))
            return {origin.worker.partition(".")[0] for origin in origins if origin}

        eventually(lambda: served() >= set(names))
