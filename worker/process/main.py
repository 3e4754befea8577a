"""The processes of the pool: each stays warm while it holds one model after the other."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import queue
import signal
import threading
from multiprocessing.connection import Connection

import msgspec
from setproctitle import setproctitle

from tokenyard import clock
from tokenyard.process import logs
from tokenyard.process.interpreter import collect_seldom, deepen_main, end_with_threads
from tokenyard.process.logs import throttle_errors
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.telemetry.tracing import Tracer
from worker import executor, messages
from worker.engines import Backend, DeviceLost
from worker.engines.loading import make_backend, make_core_backend
from worker.process.lane_session import LaneSession, PipeLaneSession, RedisLaneSession
from worker.process.loop import EngineLoop
from worker.process.recent_results import RecentResults
from worker.process.stats import RunningStats, read_stats

log = logging.getLogger("tokenyard.worker.process")

HEARTBEAT_S = 1.0


def main(
    settings: WorkerSettings,
    device: int,
    log_level: int,
    pipe: Connection,
    output: Connection,
    core: str,
    is_adopting: bool,
) -> None:
    """Entry point of a worker process, whose core, if it has one, listens at the address ``core``.

    With ``is_adopting`` the core has a model already, which the first command names.
    """
    start_process(f"tokenyard worker {settings.yard} device {device}", log_level, output)
    throttle_errors(settings.redis_url)
    process = WorkerProcess(settings, device, pipe, core, is_adopting=is_adopting)
    try:
        process.run()
    except Exception as error:
        # The controller reports, in a sentence, why a process does not start.
        level = logging.ERROR if process.is_warm else logging.DEBUG
        log.log(level, "worker process ends", exc_info=True)
        pipe.send(messages.ProcessFailed(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def core_main(
    settings: WorkerSettings, device: int, log_level: int, address: str, output: Connection
) -> None:
    """Entry point of the core of a device; it listens at ``address`` for its front."""
    start_process(f"tokenyard core {settings.yard} device {device}", log_level, output)
    try:
        backend = make_core_backend(settings, device, executor)
        from worker.engines.vllm.core_process import CoreProcess  # after the look at the CPU

        process = CoreProcess(backend, address)
    except Exception:
        # Its front fails alike, and the controller reports why in a sentence.
        log.debug("a core does not start", exc_info=True)
        raise SystemExit(1) from None
    process.run()


def start_process(title: str, log_level: int, output: Connection) -> None:
    """Prepare a process that its controller has just forked; it ends when the controller does.

    Standard error goes to ``output``, where the controller keeps the last lines.
    """
    os.dup2(output.fileno(), 2)
    output.close()
    faulthandler.enable(all_threads=False)
    # The controller decides when to stop; a Ctrl-C in the terminal reaches its processes too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle(title)
    logs.start(log_level)
    deepen_main()  # vLLM looks at a grammar before it is compiled
    end_with_threads()  # without its reader or publisher a lane would never be served
    collect_seldom()
    threading.Thread(target=_die_with_controller, name="controller", daemon=True).start()


def _die_with_controller() -> None:
    """End when the controller does: nobody renews the lease then, and the lane is rescued."""
    # Not `os.getppid`: it would miss a controller that died before this line.
    controller = multiprocessing.parent_process()
    if controller is not None:
        controller.join()
        os._exit(1)


class WorkerProcess:
    """Warms up, then loads and serves the models that its controller names."""

    def __init__(
        self,
        settings: WorkerSettings,
        device: int,
        pipe: Connection,
        core: str = "",
        *,
        is_adopting: bool = False,
    ) -> None:
        self._settings = settings
        self._core = core
        self._is_adopting = is_adopting
        self._device = device
        self._pipe = pipe
        self._pipe_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[messages.ToProcess] = queue.SimpleQueue()
        self._loop: EngineLoop | None = None
        self._stats = RunningStats(has_readers=bool(settings.metrics_port))
        self._backend: Backend | None = None
        self._loads = 0  # loads that were tried
        self.is_warm = False  # has completed its warm-up
        name = f"{settings.name}/{device}"
        self._tracer = Tracer("tokenyard-worker", name, settings.otlp_endpoint)

    def run(self) -> None:
        """Warm up, then run commands until `Stop`."""
        for target in (self._receive, self._send_heartbeats):
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True).start()
        self._tracer.start()
        self._backend = backend = make_backend(self._settings, self._core)
        phases_s = backend.warm_up()
        if not self._is_adopting:
            self._send(messages.Warm(backend.memory(), phases_s))
        self.is_warm = True
        while self._run_command(backend, self._inbox.get()):
            pass
        self._send(self._heartbeat(None))  # what was published since the last one
        self._tracer.stop()
        log.info("device %d: process stops", self._device)

    def _run_command(self, backend: Backend, command: messages.ToProcess) -> bool:
        """Run a command while no model is loaded; returns whether the process continues."""
        match command:
            case messages.LoadModel(_, group) if group is not None and group.rank:
                began = clock.monotonic()
                backend.attend(group)
                self._send(messages.Warm(backend.memory(), {"attached": clock.monotonic() - began}))
            case messages.LoadModel():
                return self._serve_model(backend, command)
            case messages.Stop():
                return False
            case _:  # meant for a model that is gone
                log.debug("too late: %s", command)
        return True

    def _serve_model(self, backend: Backend, command: messages.LoadModel) -> bool:
        """Load a model and serve it until it is unloaded; returns whether the process continues."""
        spec = command.spec
        self._loads += 1
        try:
            engine = backend.load(spec, command.group, command.weights)
        except DeviceLost:
            raise  # no other model would load here either
        except Exception as error:
            log.debug("%s cannot be loaded", spec.name, exc_info=True)
            self._send(messages.CommandRefused(f"{spec.name}: {type(error).__name__}: {error}"))
            return True
        results = RecentResults()

        def open_session(worker: str) -> LaneSession:
            if worker == messages.LOCAL:
                return PipeLaneSession(engine.info, self._send)
            return RedisLaneSession(
                self._settings,
                spec,
                engine.info,
                worker,
                self._inbox,
                stats=self._stats,
                tracer=self._tracer,
                results=results,
            )

        self._loop = loop = EngineLoop(
            engine, self._inbox, open_session, backend.memory, self._send, results
        )
        engine.listen(lambda: self._inbox.put(messages.OutputsReady()))
        self._send(messages.Ready(engine.info, backend.memory()))
        loop.run()
        self._loop = None
        began = clock.monotonic()
        engine.close()
        if not loop.is_stopped:
            self._send(messages.Warm(backend.memory(), {"unload": clock.monotonic() - began}))
        return not loop.is_stopped

    def _send(self, message: messages.ToController) -> None:
        with self._pipe_lock:
            self._pipe.send(message)

    def _receive(self) -> None:
        """Put the controller's commands into the inbox."""
        while True:
            try:
                command: messages.ToProcess = self._pipe.recv()
            except (EOFError, OSError):  # the controller is dead, and this process ends
                return
            self._inbox.put(command)

    def _send_heartbeats(self) -> None:
        """Report progress once a second, so that the controller notices a hang."""
        while True:
            clock.sleep(HEARTBEAT_S)
            try:
                self._send(self._heartbeat(self._loop))
            except OSError:
                return

    def _heartbeat(self, loop: EngineLoop | None) -> messages.Heartbeat:
        stats = self._stats
        counts = stats.counts() if self._settings.metrics_port else None
        tally = self._with_sensors(stats.now() if loop else WorkerTotals())
        if loop is None:
            return messages.Heartbeat(0, 0, tally, stats.error, counts)
        return messages.Heartbeat(
            loop.progress,
            loop.unfinished,
            tally,
            stats.error,
            counts,
            self._engine_stats(),
            loop.engine.is_worn,
        )

    def _with_sensors(self, tally: WorkerTotals) -> WorkerTotals:
        """Counts together with what the sensors of the device say."""
        if self._backend is None:
            return tally
        said = self._backend.read_sensors()
        return msgspec.structs.replace(
            tally, temperature_c=said.temperature_c, power_w=said.power_w
        )

    def _engine_stats(self) -> messages.EngineStats | None:
        """The engine's own metrics, if metrics are served."""
        if not self._settings.metrics_port or self._settings.engine != "vllm":
            return None
        return messages.EngineStats(self._loads, read_stats())
