"""A coordinator or a controller as a process of one's own program.

`coordinator.entrypoint` and `worker.entrypoint` are targets for `multiprocessing.Process`, with
any of its start methods. They say over a pipe where they are, or why they could not start, and
set an event once they are up. `wait_started` waits for either, and for the end of the process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Final, Literal, NoReturn, Protocol

import redis

from tokenyard.broker.check import write_error
from tokenyard.broker.connection import open_connection, public_url, translated
from tokenyard.process.gc_tuning import collect_seldom
from tokenyard.protocol.errors import BrokerNotWritable, NotStarted, TokenyardError, WaitTimeout
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import CoordinatorSettings, WorkerSettings

log = logging.getLogger("tokenyard.process.embedding")

DEFAULT_START_TIMEOUT_S: Final = 600.0
_LOOK_S: Final = 0.2
#: Longest wait for a process that has let go of its pipes to have ended.
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Where a coordinator or a controller is, once it is up."""

    role: Literal["coordinator", "worker"]
    redis_url: str  # without user and password
    yard: str
    name: str
    pid: int
    epoch: int = 0  # of a coordinator that leads; 0: it stands by
    workers: tuple[str, ...] = ()  # of a controller: their names in the yard, with incarnation

    @property
    def leads(self) -> bool:
        """Whether it is the coordinator that leads."""
        return self.epoch > 0


@dataclass(frozen=True, slots=True)
class StartupError:
    """Why a process did not start; sent over the pipe instead of a `ServiceAddress`."""

    kind: str  # the name of the error
    message: str


class Embedded(Protocol):
    """What runs in the process."""

    def run(self) -> int:
        """Work until stopped; the exit status."""

    def stop(self) -> None:
        """End `run` in order."""

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until it is up."""

    def address(self) -> ServiceAddress:
        """Where it is."""


def run_embedded(
    make: Callable[[], Embedded],
    settings: CoordinatorSettings | WorkerSettings,
    *,
    ready_event: Event | None,
    pipe: Connection | None,
    die_with_parent: bool,
) -> NoReturn:
    """Run it until SIGTERM or SIGINT, and end the process; what goes wrong goes over the pipe."""
    report = _StartupReport(ready_event, pipe)
    collect_seldom()
    try:
        _expect_broker(settings)
        program = make()
        parent = multiprocessing.parent_process()
        if die_with_parent and parent is not None:
            _in_background(lambda: _follow(parent, program), "follow-parent")
        _in_background(lambda: report.up_when_ready(program), "announce")
        status = program.run()
    except (TokenyardError, redis.RedisError, OSError) as error:
        log.error("%s", error)
        report.failed(type(error).__name__, str(error))
        sys.exit(1)
    except Exception as error:
        report.failed(type(error).__name__, str(error))
        raise
    report.failed("NotStarted", f"it was stopped before it was up (status {status})")
    sys.exit(status)


def wait_started(
    process: BaseProcess, pipe: Connection, timeout_s: float = DEFAULT_START_TIMEOUT_S
) -> ServiceAddress:
    """Wait in the parent until the process is up; ``pipe`` is the parent's end.

    Raises `NotStarted` with its reason where it is not or has died, and `WaitTimeout`, after
    which it goes on starting.
    """
    is_heard = multiprocessing.connection.wait([pipe, process.sentinel], timeout_s)
    # What it has said counts, also where it has ended since.
    with contextlib.suppress(EOFError, OSError):
        if pipe.poll():
            said: ServiceAddress | StartupError = pipe.recv()
            if isinstance(said, ServiceAddress):
                return said
            raise NotStarted(f"{process.name}: {said.kind}: {said.message}")
    # Its pipes close a moment before it can be seen to have ended.
    process.join(_END_S if is_heard else 0)
    if process.exitcode is not None:
        raise NotStarted(f"{process.name}: it has ended before it was up ({process.exitcode})")
    raise WaitTimeout(f"{process.name} is not up within {timeout_s:g} s")


class _StartupReport:
    """Tells the parent once whether it is up; nobody need be there to hear it."""

    def __init__(self, ready_event: Event | None, pipe: Connection | None) -> None:
        self._ready_event = ready_event
        self._pipe = pipe
        self._turn = threading.Lock()
        self._has_told = False

    def up_when_ready(self, program: Embedded) -> None:
        """Wait until it is up, and say so."""
        while not program.wait_until_ready(_LOOK_S):
            if self._has_told:
                return
        if self._tell(program.address()) and self._ready_event is not None:
            self._ready_event.set()

    def failed(self, kind: str, message: str) -> None:
        """It ends; of interest where it was not up before."""
        self._tell(StartupError(kind, message))

    def _tell(self, what: ServiceAddress | StartupError) -> bool:
        with self._turn:
            if self._has_told:
                return False
            self._has_told = True
            if self._pipe is not None:
                with contextlib.suppress(OSError):  # the other end is gone
                    self._pipe.send(what)
                self._pipe.close()
            return True


def _expect_broker(settings: CoordinatorSettings | WorkerSettings) -> None:
    """Raises where the broker does not answer, refuses the user, or takes no writes."""
    url = settings.redis_url
    with translated(url), open_connection(url, retries=1) as connection:
        connection.time()
        error = write_error(connection, Keys(settings.yard))
    if error:
        code = error.rpartition("(")[2].rstrip(")")
        raise BrokerNotWritable(f"Redis at {public_url(url)} {error}", code)


def _follow(parent: BaseProcess, program: Embedded) -> None:
    """Without its parent nobody would stop it."""
    parent.join()
    log.warning("the parent has ended; stopping")
    program.stop()


def _in_background(target: Callable[[], None], name: str) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


def started_address(
    role: Literal["coordinator", "worker"],
    settings: CoordinatorSettings | WorkerSettings,
    pid: int,
    *,
    epoch: int = 0,
    workers: tuple[str, ...] = (),
) -> ServiceAddress:
    """The address of what runs with these settings."""
    return ServiceAddress(
        role=role,
        redis_url=public_url(settings.redis_url),
        yard=settings.yard,
        name=settings.name,
        pid=pid,
        epoch=epoch,
        workers=workers,
    )
