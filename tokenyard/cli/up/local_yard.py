"""Runs a whole yard on this machine: broker, coordinator, controller with workers, gateway.

Beside a gateway runs a batch worker, for its batches. Without one, the board runs by itself.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import DeviceName, EngineName, default_name
from tokenyard.protocol.texts import counted
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts
from tokenyard.yard.snapshot import WorkerView, YardView, read_yard

#: Time for the coordinator, which has no requests to finish.
_COORDINATOR_STOP_S: Final = 10.0
#: Time for a batch worker, whose job goes on when it is started again.
_BATCH_STOP_S: Final = 30.0
#: Time for a controller beyond that for its requests.
_CONTROLLER_STOP_S: Final = 15.0
_WORKER: Final = "worker"
_GATEWAY: Final = "gateway"
_BATCH: Final = "batch"
_BOARD: Final = "board"
#: Time for a board, which has little to finish.
_BOARD_STOP_S: Final = 15.0
#: Parts without which a yard still serves.
_OPTIONAL: Final = frozenset({_GATEWAY, _BATCH, _BOARD})
#: Variables that say where the gateway keeps files.
_FILES: Final = frozenset({"TOKENYARD_GATEWAY_FILES_DIR", "TOKENYARD_GATEWAY_FILES_URL"})
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
    port: int | None = 0  # of the embedded broker; 0: any, None: the previous one, or 6379
    server: str = EMBEDDED  # see `choose_server`
    workers: int  # devices, each with one awake process
    engine: EngineName
    model: str
    models: Path | None = None  # a models file instead of one model
    spares: int = 0
    sleepers: int = 0
    # Prefix of the workers' names, which distinguishes ours.
    name: str = field(default_factory=lambda: default_name("worker"))
    grace_s: float = 30.0  # running requests may finish for so long
    start_timeout_s: float = 600.0
    # For tiny models, which compiling does not pay for; the environment may override it.
    enforce_eager: bool = False
    device: DeviceName = "auto"  # what engines use
    devices: tuple[str, ...] = ()  # GPUs, one for each worker
    # Of a gateway on loopback, beside which a batch worker runs; None: there is neither.
    http_port: int | None = None
    has_board: bool = False  # at the gateway
    board_port: int | None = None  # of a board by itself, on loopback; None: there is none
    debug: bool = False

    @property
    def processes(self) -> int:
        """Worker processes that must be up before the yard is ready."""
        if self.models is None:
            return self.workers
        return self.workers * (1 + self.sleepers) + self.spares


class LocalYard:
    """Starts the parts of a yard in order, watches them, and stops them in reverse.

    ``say`` is called with the name of a part and each line that it logs.
    """

    def __init__(self, plan: LocalPlan, say: Callable[[str, LogLine], None]) -> None:
        self._plan = plan
        self._say = say
        self._keys = Keys(plan.yard)
        self._broker: EmbeddedBroker | None = None
        self._children: list[Child] = []
        self._connection: redis.Redis | None = None
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
        return broker | {child.name: child.pid for child in self._children}

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
        self._connection = open_connection(self.url)
        with translated(self.url):
            warnings = check_broker(self._connection, self._plan.yard)
            if self._broker:  # our yard has what we list now, not what we did last time
                self._connection.delete(self._keys.hosts)
        # An earlier run with the same name may have left leases.
        self._before = {worker.worker for worker in self.view().workers}
        for child in self._programs(logs):
            self._children.append(child)
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
        coordinator = [*program, "coordinator", *debug]
        controller = [*program, "worker", *debug, *_worker_arguments(plan)]
        yield Child("coordinator", coordinator, logs / "coordinator.log", env, _COORDINATOR_STOP_S)
        stop_s = plan.grace_s + _CONTROLLER_STOP_S
        yield Child(_WORKER, controller, logs / "worker.log", env, stop_s)
        if plan.http_port is not None:
            gateway = [*program, "gateway", *debug, f"--port={plan.http_port}"]
            gateway += [f"--grace-s={plan.grace_s}", f"--{'' if plan.has_board else 'no-'}board"]
            if not _FILES & env.keys():
                env["TOKENYARD_GATEWAY_FILES_DIR"] = str(plan.data_dir.absolute() / "files")
            yield Child(_GATEWAY, gateway, logs / "gateway.log", env, stop_s)
            batch = [*program, "batch", "worker", *debug]
            yield Child(_BATCH, batch, logs / "batch.log", env, _BATCH_STOP_S)
        if plan.board_port is not None:
            board = [*program, "board", *debug, f"--port={plan.board_port}"]
            yield Child(_BOARD, board, logs / "board.log", env, _BOARD_STOP_S)

    def wait_ready(self, tell: Callable[[bool, int], None]) -> None:
        """Wait until a coordinator leads and all our workers are ready, or warm.

        ``tell`` is called with whether one leads and how many workers are ready.

        Raises `YardFailed` after ``start_timeout_s`` or when a part ends for good.
        """
        until = clock.monotonic() + self._plan.start_timeout_s
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
                    f"after {self._plan.start_timeout_s:g} s, {ready} of"
                    f" {counted(self._plan.processes, 'worker')} came up; the end of the log:\n"
                    + self._child(_WORKER).log_end()
                )
            clock.sleep(_POLL_S)

    def _child(self, name: str) -> Child:
        return next(child for child in self._children if child.name == name)

    @property
    def http_url(self) -> str | None:
        """The base URL for OpenAI's clients; None without a gateway."""
        return f"http://127.0.0.1:{self._plan.http_port}/v1" if self._has(_GATEWAY) else None

    @property
    def board_url(self) -> str | None:
        """The URL of the board; None without one."""
        if self._has(_BOARD):
            return f"http://127.0.0.1:{self._plan.board_port}/board"
        has_one = self._plan.has_board and self._has(_GATEWAY)
        return f"http://127.0.0.1:{self._plan.http_port}/board" if has_one else None

    def _has(self, name: str) -> bool:
        return any(child.name == name for child in self._children)

    def _serves_http(self) -> bool:
        """Whether the gateway and the board answer, where there are any."""
        gateway = self._plan.http_port if self._has(_GATEWAY) else None
        board = self._plan.board_port if self._has(_BOARD) else None
        return _answers(gateway, "/health") and _answers(board, "/board/static/board.js")

    def _is_up(self, worker: WorkerView) -> bool:
        """Whether it can serve, or load a model."""
        may_load = self._plan.models is not None and worker.state == "warm"
        return self._is_ours(worker) and (worker.is_ready or may_load)

    def _is_ours(self, worker: WorkerView) -> bool:
        is_named = worker.info is not None and worker.info.controller == self._plan.name
        return is_named and worker.worker not in self._before

    def view(self) -> YardView:
        """The yard now."""
        if self._connection is None:
            raise RuntimeError("not started")
        with translated(self.url):
            return read_yard(Yard(self._connection, self._keys))

    def run(self) -> None:
        """Watch until interrupted, or until all our workers have been drained or stopped.

        Raises `YardFailed` when a part ends for good otherwise.
        """
        while not self._is_drained:
            self.watch()
            clock.sleep(_POLL_S)

    def watch(self) -> None:
        """Pass on new log lines, and restart parts that have died."""
        for child in tuple(self._children):
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
        self._children.remove(child)
        self._say(child.name, LogLine("WARNING", f"is off: {child.error() or child.log}"))

    def _retire_ours(self) -> None:
        """End the leases of our workers, which died with the controller, to move their requests."""
        if self._connection is None:
            return
        scripts = Scripts(Yard(self._connection, self._keys))
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
                for child in self._children[:-1]:
                    child.terminate()
            return is_hurried

        while self._children:
            self._children[-1].stop(hurried)
            self._children.pop()
        if self._connection is not None:
            self._connection.close()
        if self._broker is not None:
            self._broker.stop()


def _answers(port: int | None, path: str) -> bool:
    """Whether a server on loopback answers well; also where there is none."""
    if port is None:
        return True
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_HEALTH_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _worker_arguments(plan: LocalPlan) -> list[str]:
    given: Mapping[str, str] = {
        "name": plan.name,
        "model": plan.model,
        "models": str(plan.models or ""),
        "spares": str(plan.spares),
        "sleepers": str(plan.sleepers),
        "engine": plan.engine,
        "device": plan.device,
        "devices": ",".join(plan.devices),
        "slots": str(plan.workers),
        "grace-s": str(plan.grace_s),
        "start-timeout-s": str(plan.start_timeout_s),
    }
    return [f"--{name}={value}" for name, value in given.items() if value]
