"""One place on a host: the process that fills it now, and its standing in the yard.

A `Slot` decides nothing about time or Redis: the controller tells it what happened, and it says
what state it is in. Its process is spawned, never forked, so no CUDA context is inherited.
"""

from __future__ import annotations

import enum
import logging
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from redis.backoff import ExponentialWithJitterBackoff

from tokenyard.scripts import Why
from tokenyard.settings import WorkerSettings
from tokenyard.worker_info import WorkerInfo, WorkerState
from worker.engines import EngineInfo
from worker.messages import Beat, ToController, ToProcess
from worker.process import main

log = logging.getLogger("tokenyard.worker.slot")

_spawn = multiprocessing.get_context("spawn")
#: A process that served for so long before it died starts the count of failures anew.
HEALTHY_S = 60.0
#: Signals that come from outside the process, such as the kernel's when memory runs out.
KILLS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class State(enum.Enum):
    """Life of a slot's process."""

    DOWN = "down"  # none runs; started again when the pause is over
    STARTING = "starting"  # runs, engine not up yet
    READY = "ready"  # engine up
    DRAINING = "draining"  # finishes what it has
    STOPPED = "stopped"  # ended for good


class Slot:
    """The process of one slot."""

    def __init__(self, settings: WorkerSettings, index: int) -> None:
        self.index = index
        self.name = f"{settings.name}-{index}" if settings.slots > 1 else settings.name
        self.state = State.DOWN
        self.worker = ""  # its name in the yard, with incarnation, while it has one
        self.engine: EngineInfo | None = None
        self.process: BaseProcess | None = None
        self.pipe: Connection | None = None
        self.start_at = 0.0  # monotonic
        self.last_words = ""  # what the process said of its end, or why it was killed
        self._settings = settings
        self._backoff = ExponentialWithJitterBackoff(
            cap=settings.max_backoff_s, base=settings.backoff_s
        )
        self._failures = 0
        self._started = 0.0
        self._beat = Beat(0, 0)
        self._moved = 0.0  # when progress was last seen, or had no reason to be

    def start(self) -> None:
        """Spawn a process for this slot."""
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(
            target=main, args=(self._settings, self.index, theirs), name=self.name
        )
        self.process.start()
        theirs.close()
        self.state = State.STARTING
        self._started = self._moved = time.monotonic()
        self._beat = Beat(0, 0)
        log.info("slot %d: process %s starts", self.index, self.process.pid)

    def send(self, command: ToProcess) -> None:
        """Tell the process; one that is gone is noticed by its sentinel."""
        if self.pipe is None:
            return
        try:
            self.pipe.send(command)
        except OSError:
            log.debug("slot %d: pipe is gone", self.index)

    def receive(self) -> list[ToController]:
        """What the process has said since."""
        messages: list[ToController] = []
        try:
            while self.pipe is not None and self.pipe.poll():
                messages.append(self.pipe.recv())
        except (EOFError, OSError):
            self.pipe = None
        return messages

    def note_beat(self, beat: Beat) -> None:
        """The process is alive; whether it also gets on is seen from ``beat``."""
        if beat.progress != self._beat.progress or not beat.unfinished:
            self._moved = time.monotonic()
        self._beat = beat

    def excuse(self, seconds: float) -> None:
        """Time in which nobody listened to the process does not count against it."""
        self._moved = min(time.monotonic(), self._moved + seconds)

    @property
    def fault(self) -> str:
        """Why the process should be killed, or "" while it should not."""
        quiet_s = time.monotonic() - self._moved
        if self.state is State.STARTING and quiet_s > self._settings.start_timeout_s:
            return f"engine not up after {quiet_s:.0f} s"
        serving = self.state in (State.READY, State.DRAINING)
        if serving and quiet_s > self._settings.hang_timeout_s:
            return f"no progress for {quiet_s:.0f} s while {self._beat.unfinished} requests wait"
        return ""

    def ready(self, engine: EngineInfo) -> None:
        """The engine is up."""
        self.state = State.READY
        self.engine = engine
        self._moved = time.monotonic()

    def kill(self) -> None:
        """End the process at once; its sentinel tells the rest."""
        if self.process is not None:
            self.process.kill()

    def departure(self) -> tuple[Why, str]:
        """How the process, which is dead, ended: by itself or by a hand from outside."""
        status = None
        if self.process is not None:
            self.process.join()
            status = self.process.exitcode
        words = f": {self.last_words}" if self.last_words else ""
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            from_outside = -status in KILLS and not self.last_words
            return "lost" if from_outside else "crashed", f"ended by {name}{words}"
        return "crashed", f"exit status {status}{words}"

    def bury(self) -> int | None:
        """The process is dead: clean up and plan the next start; its exit status, if it had one."""
        status = None
        if self.process is not None:
            self.process.join()
            status = self.process.exitcode
            self.process.close()
        if self.pipe is not None:
            self.pipe.close()
        lived_s = time.monotonic() - self._started
        self._failures = 1 if lived_s > HEALTHY_S else self._failures + 1
        self.process, self.pipe, self.engine, self.worker = None, None, None, ""
        self.last_words = ""
        self.state = State.DOWN
        self.start_at = time.monotonic() + self._backoff.compute(self._failures)
        return status

    def roster_entry(self) -> WorkerInfo:
        """What the yard is told of this worker."""
        engine = self.engine
        if engine is None:
            raise RuntimeError(f"slot {self.index} has no engine to show")
        state: WorkerState = "ready" if self.state is State.READY else "draining"
        return WorkerInfo(
            name=self.name,
            state=state,
            model=engine.model,
            revision=engine.revision,
            engine=engine.engine,
            engine_version=engine.engine_version,
            host=socket.gethostname(),
            pid=(self.process.pid or 0) if self.process else os.getpid(),
            slots=engine.slots,
            lane_limit=self._settings.lane_limit,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            tokenizer=engine.tokenizer,
            started_ms=int((time.time() - (time.monotonic() - self._started)) * 1000),
            phases_s=engine.phases_s,
        )
