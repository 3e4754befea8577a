"""Runs a whole yard on this machine: broker, coordinator, controller with workers, gateway.

Beside a gateway runs a batch worker, for its batches. Without one, the board runs by itself.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import redis

from tokenyard import clock
from tokenyard.broker.check import check_broker
from tokenyard.broker.connection import open_connection, translated
from tokenyard.broker.url import CREDENTIALS
from tokenyard.cli.up.child import Child, LogLine
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.process.program import Exit
from tokenyard.process.servers import EMBEDDED, choose_server
from tokenyard.process.settings_options import options_of
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.texts import counted
from tokenyard.scripts import Scripts
from tokenyard.yard.snapshot import WorkerView, YardView, read_yard

#: Time for the coordinator, which has no requests to finish.
_COORDINATOR_STOP_S: Final = 10.0
#: Time for a batch worker, whose job goes on when it is started again.
_BATCH_STOP_S: Final = 30.0
#: Time for the others, beyond that for running requests.
_STOP_S: Final = 15.0
_WORKER: Final = "worker"
_GATEWAY: Final = "gateway"
_BATCH: Final = "batch"
_BOARD: Final = "board"
#: What speaks HTTP, and where it answers once it serves.
_SERVING: Final = {_GATEWAY: "/health", _BOARD: "/board/static/board.js"}
#: Parts without which a yard still serves.
_OPTIONAL: Final = frozenset({_GATEWAY, _BATCH, _BOARD})
#: Variables that say where the gateway keeps files.
_FILES: Final = frozenset({"TOKENYARD_GATEWAY_FILES_DIR", "TOKENYARD_GATEWAY_FILES_URL"})
#: The settings of the controller that `up` gives it; it reads the others from its variables.
_GIVEN: Final = (
    *("name", "engine", "model", "models", "slots", "spares", "sleepers", "device", "devices"),
    *("grace_s", "start_timeout_s"),
)
#: Variables that the plan contains already; the child must not read them again.
_DECIDED: Final = ("TOKENYARD_WORKER_MODEL", "TOKENYARD_WORKER_MODELS")
_POLL_S: Final = 0.1
_HEALTH_S: Final = 2.0


class YardFailed(click.ClickException):
    """A part of the yard has ended and is not restarted."""


class WorkersFailed(YardFailed):
    """The workers cannot start; with the controller's message."""

    exit_code = Exit.START_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """The settings of a local yard."""

    yard: str
    redis_url: str  # "" for an embedded broker
    data_dir: Path  # data of the embedded broker, and all log files
    worker: WorkerSettings  # of the controller; its broker and its yard are those of the plan
    port: int | None = 0  # of the embedded broker; 0: any, None: the previous one, or 6379
    server: str = EMBEDDED  # see `choose_server`
    # For tiny models, which compiling does not pay for; the environment may override it.
    enforce_eager: bool = False
    http_port: int = 0  # of the gateway, or without one of the board, on loopback
    has_gateway: bool = False  # beside which a batch worker runs
    has_board: bool = False
    debug: bool = False

    @property
    def processes(self) -> int:
        """Worker processes that must be up before the yard is ready."""
        worker = self.worker
        if worker.models is None:
            return worker.slots
        return worker.slots * (1 + worker.sleepers) + worker.spares


class LocalYard:
    """Starts the parts of a yard in order, watches them, and stops them in reverse.

    ``say`` is called with the name of a part and each line that it logs.
    """

    def __init__(self, plan: LocalPlan, say: Callable[[str, LogLine], None]) -> None:
        self._plan = plan
        self._say = say
        self._broker: EmbeddedBroker | None = None
        self._children: dict[str, Child] = {}
        self._yard: Yard | None = None
        self._before: set[str] = set()  # workers of earlier runs
        self._is_drained = False  # our controller has ended, with all its workers
        self.url = plan.redis_url

    @property
    def server(self) -> str:
        """Name and version of our broker, like ``Valkey 9.1.2``; "" if it is not ours."""
        return self._broker.title if self._broker else ""

    @property
    def lost_port(self) -> int:
        """The previous port of the broker if it is taken now; else 0."""
        return self._broker.lost_port if self._broker else 0

    @property
    def pids(self) -> dict[str, int]:
        """Processes by part."""
        broker = {"broker": self._broker.pid} if self._broker else {}
        return broker | {name: child.pid for name, child in self._children.items()}

    def start(self) -> list[str]:
        """Start everything; warnings about the broker.

        Raises `tokenyard.protocol.errors.TokenyardError` if the broker cannot be used.
        """
        logs = self._plan.data_dir / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.url:
            self._broker = EmbeddedBroker(
                self._plan.data_dir, port=self._plan.port, server=choose_server(self._plan.server)
            )
            self.url = self._broker.start()
        yard = self._yard = Yard(open_connection(self.url), Keys(self._plan.yard))
        with translated(self.url):
            warnings = check_broker(yard.connection, self._plan.yard)
            if self._broker:  # our yard has what we list now, not what we did last time
                yard.connection.delete(yard.keys.hosts)
        # An earlier run with the same name may have left leases.
        self._before = {worker.worker for worker in self.view().workers}
        for child in self._programs(logs):
            self._children[child.name] = child
            child.start()
        return warnings

    def _programs(self, logs: Path) -> Iterator[Child]:
        plan = self._plan
        # Not as arguments, because the URL may contain a password.
        env = {**os.environ, "TOKENYARD_REDIS_URL": self.url, "TOKENYARD_YARD": plan.yard}
        for name in (*_DECIDED, *CREDENTIALS):
            env.pop(name, None)
        if plan.enforce_eager:
            env.setdefault("TOKENYARD_WORKER_ENFORCE_EAGER", "true")
        # -P ignores a module `tokenyard` in the working directory. Not `-m worker`, which could run
        # the user's own module `worker`.
        program = [sys.executable, "-P", "-m", "tokenyard"]
        debug = ["--debug"] if plan.debug else []

        def child(name: str, stop_s: float, *words: str) -> Child:
            return Child(name, [*program, *words, *debug], logs / f"{name}.log", env, stop_s)

        yield child("coordinator", _COORDINATOR_STOP_S, "coordinator")
        stop_s = plan.worker.grace_s + _STOP_S
        yield child(_WORKER, stop_s, "worker", *options_of(plan.worker, _GIVEN))
        if plan.has_gateway:
            if not _FILES & env.keys():
                env["TOKENYARD_GATEWAY_FILES_DIR"] = str(plan.data_dir.absolute() / "files")
            board = "--board" if plan.has_board else "--no-board"
            options = (f"--port={plan.http_port}", f"--grace-s={plan.worker.grace_s}", board)
            yield child(_GATEWAY, stop_s, "gateway", *options)
            yield child(_BATCH, _BATCH_STOP_S, "batch", "worker")
        elif plan.has_board:
            yield child(_BOARD, _STOP_S, "board", f"--port={plan.http_port}")

    def wait_ready(self, tell: Callable[[bool, int], None]) -> None:
        """Wait until a coordinator leads and all our workers are ready, or warm.

        ``tell`` is called with whether one leads and how many workers are ready.

        Raises `YardFailed` after ``start_timeout_s`` or when a part ends for good.
        """
        until = clock.monotonic() + self._plan.worker.start_timeout_s
        while True:
            self.watch()
            view = self.view()
            ready = sum(self._is_up(worker) for worker in view.workers)
            tell(view.leader is not None, ready)
            if self._is_drained:
                raise YardFailed("its workers have been drained or stopped before they were ready")
            if view.leader and ready >= self._plan.processes and self._serves_http():
                return
            if clock.monotonic() > until:
                raise YardFailed(
                    f"after {self._plan.worker.start_timeout_s:g} s, {ready} of"
                    f" {counted(self._plan.processes, 'worker')} came up; the end of the log:\n"
                    + self._children[_WORKER].log_end()
                )
            clock.sleep(_POLL_S)

    @property
    def http_url(self) -> str | None:
        """The base URL for OpenAI's clients; None without a gateway."""
        return f"http://127.0.0.1:{self._plan.http_port}/v1" if _GATEWAY in self._children else None

    @property
    def board_url(self) -> str | None:
        """The URL of the board; None without one."""
        has_one = self._plan.has_board and not self._children.keys().isdisjoint(_SERVING)
        return f"http://127.0.0.1:{self._plan.http_port}/board" if has_one else None

    def _serves_http(self) -> bool:
        """Whether the gateway and the board answer, where there are any."""
        paths = [path for name, path in _SERVING.items() if name in self._children]
        return all(_answers(self._plan.http_port, path) for path in paths)

    def _is_up(self, worker: WorkerView) -> bool:
        """Whether it can serve, or load a model."""
        may_load = self._plan.worker.models is not None and worker.state == "warm"
        return self._is_ours(worker) and (worker.is_ready or may_load)

    def _is_ours(self, worker: WorkerView) -> bool:
        is_named = worker.info is not None and worker.info.controller == self._plan.worker.name
        return is_named and worker.worker not in self._before

    def view(self) -> YardView:
        """The yard now."""
        if self._yard is None:
            raise RuntimeError("not started")
        with translated(self.url):
            return read_yard(self._yard)

    def run(self) -> None:
        """Watch until interrupted, or until all our workers have been drained or stopped.

        Raises `YardFailed` when a part ends for good otherwise.
        """
        while not self._is_drained:
            self.watch()
            clock.sleep(_POLL_S)

    def watch(self) -> None:
        """Pass on new log lines, and restart parts that have died."""
        for child in tuple(self._children.values()):
            for line in child.listen():
                self._say(child.name, line)
            if child.status is not None:
                self._revive(child)
        if self._broker and not self._broker.is_running:
            raise YardFailed(f"the broker has ended; see {self._broker.log}")

    def _revive(self, child: Child) -> None:
        status, pid = child.status, child.pid
        if child.name == _WORKER and status == Exit.OK:
            if not self._is_drained:
                self._say(child.name, LogLine("INFO", "its workers have ended"))
            self._is_drained = True
            return
        if status == Exit.START_FAILED and (message := child.error()):
            raise WorkersFailed(message)
        self._say(child.name, LogLine("WARNING", f"process {pid} has ended, status {status}"))
        if child.name == _WORKER:
            self._retire_ours()
        if child.restart():
            return
        if child.name not in _OPTIONAL:
            raise YardFailed(
                f"the {child.name} has ended for good (status {status}); the end of"
                f" {child.log}:\n{child.log_end()}"
            )
        del self._children[child.name]
        self._say(child.name, LogLine("WARNING", f"is off: {child.error() or child.log}"))

    def _retire_ours(self) -> None:
        """End the leases of our workers, which died with the controller, to move their requests."""
        if self._yard is None:
            return
        scripts = Scripts(self._yard)
        with contextlib.suppress(redis.RedisError, BrokerUnavailable):
            for worker in self.view().workers:
                if self._is_ours(worker) and worker.lease_ms:
                    scripts.retire(worker.worker, "lost")

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Stop workers, coordinator and broker, in this order; idempotent.

        If ``hurry`` returns True, workers and coordinator are stopped together.
        """
        is_hurried = False

        def hurried() -> bool:
            nonlocal is_hurried
            if hurry() and not is_hurried:
                is_hurried = True
                for child in self._children.values():
                    child.terminate()
            return is_hurried

        while self._children:
            next(reversed(self._children.values())).stop(hurried)
            self._children.popitem()
        if self._yard is not None:
            self._yard.connection.close()
        if self._broker is not None:
            self._broker.stop()


def _answers(port: int, path: str) -> bool:
    """Whether a server on loopback answers well."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_HEALTH_S)
    try:
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
