"""A coordinator or a controller as a child process of the user's own program.

`coordinator.entrypoint` and `worker.entrypoint` are targets for `multiprocessing.Process`, with any
of its start methods. They send their address over a pipe, or why they could not start, and set an
event once they are ready. `wait_started` waits for either, and for the end of the process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
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
from tokenyard.broker.connection import connected
from tokenyard.broker.url import public_url
from tokenyard.process.interpreter import collect_seldom, end_with_threads
from tokenyard.protocol.errors import BrokerNotWritable, NotStarted, TokenyardError, WaitTimeout
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.settings import ServiceSettings

log = logging.getLogger("tokenyard.process.embedding")

DEFAULT_START_TIMEOUT_S: Final = 600.0
_POLL_S: Final = 0.2
#: Longest wait for the end of a process that has closed its pipes.
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Identifies a coordinator or a controller that is ready."""

    role: Literal["coordinator", "worker"]
    redis_url: str  # without user and password
    yard: str
    name: str
    pid: int
    epoch: int = 0  # of a leading coordinator; 0: it is a standby
    workers: tuple[str, ...] = ()  # of a controller: their names in the yard, with incarnation

    @property
    def leads(self) -> bool:
        """Whether it is the leading coordinator."""
        return self.epoch > 0


@dataclass(frozen=True, slots=True)
class StartupError:
    """Why a process did not start; sent over the pipe instead of a `ServiceAddress`."""

    kind: str  # the name of the error
    message: str


class Embedded(Protocol):
    """The program that runs in the process."""

    def run(self) -> int:
        """Run until stopped; returns the exit status."""

    def stop(self) -> None:
        """End `run`."""

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until it is ready."""

    def address(self) -> ServiceAddress:
        """Its address."""


def run_embedded(
    make: Callable[[], Embedded],
    settings: ServiceSettings,
    *,
    ready_event: Event | None,
    pipe: Connection | None,
    die_with_parent: bool,
) -> NoReturn:
    """Run a program until SIGTERM or SIGINT, and end the process; errors go over the pipe."""
    report = _StartupReport(ready_event, pipe)
    collect_seldom()
    end_with_threads()
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
    report.failed("NotStarted", f"it was stopped before it was ready (status {status})")
    sys.exit(status)


def wait_started(
    process: BaseProcess, pipe: Connection, timeout_s: float = DEFAULT_START_TIMEOUT_S
) -> ServiceAddress:
    """Wait in the parent until the process is ready; ``pipe`` is the parent's end.

    Raises `NotStarted` with the reason where it could not start or has died, and `WaitTimeout`,
    after which it continues to start.
    """
    has_signalled = multiprocessing.connection.wait([pipe, process.sentinel], timeout_s)
    # A message counts also where the process has ended since.
    with contextlib.suppress(EOFError, OSError):
        if pipe.poll():
            message: ServiceAddress | StartupError = pipe.recv()
            if isinstance(message, ServiceAddress):
                return message
            raise NotStarted(f"{process.name}: {message.kind}: {message.message}")
    # The pipes close a moment before the process is reported as ended.
    process.join(_END_S if has_signalled else 0)
    if process.exitcode is not None:
        raise NotStarted(f"{process.name}: it has ended before it was ready ({process.exitcode})")
    raise WaitTimeout(f"{process.name} is not ready within {timeout_s:g} s")


class _StartupReport:
    """Reports the start to the parent, once; the parent may be gone."""

    def __init__(self, ready_event: Event | None, pipe: Connection | None) -> None:
        self._ready_event = ready_event
        self._pipe = pipe
        self._lock = threading.Lock()
        self._is_sent = False

    def up_when_ready(self, program: Embedded) -> None:
        """Wait until the program is ready, and report its address."""
        while not program.wait_until_ready(_POLL_S):
            if self._is_sent:
                return
        if self._send(program.address()) and self._ready_event is not None:
            self._ready_event.set()

    def failed(self, kind: str, message: str) -> None:
        """Report the end of the program, unless it was ready before."""
        self._send(StartupError(kind, message))

    def _send(self, message: ServiceAddress | StartupError) -> bool:
        with self._lock:
            if self._is_sent:
                return False
            self._is_sent = True
            if self._pipe is not None:
                with contextlib.suppress(OSError):  # the other end is gone
                    self._pipe.send(message)
                self._pipe.close()
            return True


def _expect_broker(settings: ServiceSettings) -> None:
    """Raises where the broker does not answer, refuses the user, or takes no writes."""
    url = settings.redis_url
    with connected(url, retries=1) as connection:
        connection.time()
        error = write_error(Yard(connection, Keys(settings.yard)))
    if error:
        code = error.rpartition("(")[2].rstrip(")")
        raise BrokerNotWritable(f"Redis at {public_url(url)} {error}", code)


def _follow(parent: BaseProcess, program: Embedded) -> None:
    """Stop the program when the parent ends."""
    parent.join()
    log.warning("the parent has ended; stopping")
    program.stop()


def _in_background(target: Callable[[], None], name: str) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


def started_address(
    role: Literal["coordinator", "worker"],
    settings: ServiceSettings,
    *,
    epoch: int = 0,
    workers: tuple[str, ...] = (),
) -> ServiceAddress:
    """The address of this process, which runs a program with these settings."""
    return ServiceAddress(
        role=role,
        redis_url=public_url(settings.redis_url),
        yard=settings.yard,
        name=settings.name,
        pid=os.getpid(),
        epoch=epoch,
        workers=workers,
    )
