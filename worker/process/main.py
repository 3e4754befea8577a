"""A worker process: warm from its start to its end, with one model after the other."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from setproctitle import setproctitle

from tokenyard.broker.log_throttle import throttle_errors
from tokenyard.process.gc_tuning import collect_seldom
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.telemetry import logs
from tokenyard.telemetry.tracing import Tracer
from worker.engines import Backend, DeviceLost, Engine
from worker.engines.loading import make_backend
from worker.engines.vllm.stats import read_stats
from worker.messages import (
    Abort,
    Attach,
    Beat,
    EngineStats,
    Failed,
    Give,
    Load,
    Ready,
    Refusal,
    Stop,
    ToController,
    ToProcess,
    Warm,
)
from worker.process.ended import Ended
from worker.process.engine_control import EngineControl
from worker.process.lane_session import YardTerms
from worker.process.loop import Delivery, EngineLoop, Item, Stale, Term
from worker.process.pipe_session import LOCAL, PipeTerm
from worker.process.stats import RunningStats

log = logging.getLogger("tokenyard.worker.process")

BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Birth:
    """What a process is told when it is started."""

    settings: WorkerSettings
    device: int
    log_level: int


def main(birth: Birth, pipe: Connection, output: Connection) -> None:
    """Entry point of the process; it touches no device before this one is chosen.

    Its standard error is ``output``, so that the controller knows what it said last.
    """
    settings, device = birth.settings, birth.device
    os.dup2(output.fileno(), 2)
    output.close()
    faulthandler.enable(all_threads=False)
    # The controller decides when to stop; a Ctrl-C in the terminal reaches it too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle(f"tokenyard worker {settings.yard} device {device}")
    logs.start(birth.log_level)
    throttle_errors(settings.redis_url)
    threading.excepthook = _end_process
    collect_seldom()
    process = WorkerProcess(settings, device, pipe)
    try:
        process.run()
    except Exception as fault:
        # What keeps a process from its start is told by the controller, in words.
        level = logging.ERROR if process.is_warm else logging.DEBUG
        log.log(level, "worker process ends", exc_info=True)
        pipe.send(Failed(f"{type(fault).__name__}: {fault}"))
        raise SystemExit(1) from None


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """A reader or publisher that ended by a fault would leave its lane unserved for ever."""
    log.critical("%s ends the process", fault.thread, exc_info=fault.exc_value)
    os._exit(1)


class WorkerProcess:
    """Warms up, and then holds what its controller says."""

    def __init__(self, settings: WorkerSettings, device: int, pipe: Connection) -> None:
        self._settings = settings
        self._device = device
        self._pipe = pipe
        self._pipe_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._loop: EngineLoop | None = None
        self._tally = RunningStats(has_readers=bool(settings.metrics_port))
        self._loads = 0  # engines made, also in vain
        self.is_warm = False  # and has been since
        name = f"{settings.name}/{device}"
        self._tracer = Tracer("tokenyard-worker", name, settings.otlp_endpoint)

    def run(self) -> None:
        """Warm up, then obey until told to stop."""
        for target in (self._die_with_controller, self._listen, self._beat):
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True).start()
        self._tracer.start()
        backend = make_backend(self._settings, self._device)
        phases_s = backend.warm_up()
        self._tell(Warm(backend.memory(), phases_s))
        self.is_warm = True
        while self._obey(backend, self._inbox.get()):
            pass
        self._tell(self._next_beat(None))  # what was published since the last
        self._tracer.stop()
        log.info("device %d: process stops", self._device)

    def _obey(self, backend: Backend, command: Item) -> bool:
        """Do as told while no model is held; whether the process goes on."""
        match command:
            case Load():
                return self._hold(backend, command)
            case Attach(group):
                began = time.perf_counter()
                backend.attend(group)
                self._tell(Warm(backend.memory(), {"attached": time.perf_counter() - began}))
            case Stop():
                return False
            case _:  # of a model that is gone
                log.debug("%s comes too late", command)
        return True

    def _hold(self, backend: Backend, command: Load) -> bool:
        """Load a model and serve it until it has to go; whether the process goes on."""
        spec = command.spec
        self._loads += 1
        try:
            engine = backend.load(spec, command.group, command.weights)
        except DeviceLost:
            raise  # no other model would load here either
        except Exception as fault:
            log.debug("%s cannot be loaded", spec.name, exc_info=True)
            self._tell(Refusal(f"{spec.name}: {type(fault).__name__}: {fault}"))
            return True
        care = EngineControl(engine, backend, self._tell)
        ended = Ended()
        in_yard = YardTerms(self._settings, spec, engine.info, self._tally, self._tracer, ended)
        terms = _Terms(in_yard, engine, self._tell)
        self._loop = loop = EngineLoop(engine, self._inbox, terms, care, self._tell, ended)
        self._tell(Ready(engine.info, backend.memory()))
        loop.run()
        self._loop = None
        began = time.perf_counter()
        engine.close()
        if not loop.is_stopped:
            self._tell(Warm(backend.memory(), {"unload": time.perf_counter() - began}))
        return not loop.is_stopped

    def _tell(self, message: ToController) -> None:
        with self._pipe_lock:
            self._pipe.send(message)

    def _listen(self) -> None:
        """Commands from the controller, straight into the inbox."""
        while True:
            try:
                command: ToProcess = self._pipe.recv()
            except (EOFError, OSError):  # the controller has died; `_die_with_controller` sees it
                return
            for item in _as_items(command):
                self._inbox.put(item)

    def _beat(self) -> None:
        """Tell once a second how far the loop has come, so that a hang is seen."""
        while True:
            time.sleep(BEAT_S)
            try:
                self._tell(self._next_beat(self._loop))
            except OSError:
                return

    def _next_beat(self, loop: EngineLoop | None) -> Beat:
        counts, error = (
            self._tally.counts() if self._settings.metrics_port else None,
            self._tally.error,
        )
        if loop is None:
            return Beat(0, 0, error=error, counts=counts)
        return Beat(
            loop.progress, loop.unfinished, self._tally.now(), error, counts, self._read_stats()
        )

    def _read_stats(self) -> EngineStats | None:
        """What the engine measures of itself, where somebody reads it."""
        if not self._settings.metrics_port or self._settings.engine != "vllm":
            return None
        return EngineStats(self._loads, read_stats())

    def _die_with_controller(self) -> None:
        """Without a controller nobody renews the lease: end at once, the lane will be rescued."""
        # Not `os.getppid`: a controller that died before this line would never be missed.
        controller = multiprocessing.parent_process()
        if controller is not None:
            controller.join()
            os._exit(1)


def _as_items(command: ToProcess) -> Sequence[Item]:
    """What came over the pipe in place of a lane is taken as if it came over one."""
    match command:
        case Give(assignments):
            return [Delivery(LOCAL, assignments)]
        case Abort(entries):
            return [Stale(LOCAL, entry) for entry in entries]
    return [command]


class _Terms:
    """Makes the terms of one engine: for the yard, or for the controller alone."""

    def __init__(
        self,
        in_yard: YardTerms,
        engine: Engine,
        tell: Callable[[ToController], None],
    ) -> None:
        self._in_yard = in_yard
        self._engine = engine
        self._tell = tell

    def __call__(self, worker: str, loop: EngineLoop) -> Term:
        if worker == LOCAL:
            return PipeTerm(self._engine.info, self._tell)
        return self._in_yard(worker, loop)
