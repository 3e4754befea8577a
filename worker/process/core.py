"""The core process of a device: warm, then with one model after the other.

It holds the device, and nothing of ours runs beside its steps but the socket to its front.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import queue
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from setproctitle import setproctitle

from tokenyard.process.gc_tuning import collect_seldom
from tokenyard.process.threads import deepen_main, end_with_threads
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.telemetry import logs
from worker import executor
from worker.engines import RankGroup
from worker.engines.loading import make_core_backend
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.core")

_FLUSH_S = 1.0


def main(
    settings: WorkerSettings, device: int, log_level: int, address: str, output: Connection
) -> None:
    """Entry point of the process; it listens at ``address`` for its front."""
    os.dup2(output.fileno(), 2)
    output.close()
    faulthandler.enable(all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle(f"tokenyard core {settings.yard} device {device}")
    logs.start(log_level)
    deepen_main()
    end_with_threads()
    collect_seldom()
    CoreProcess(settings, device, address).run()


class CoreProcess:
    """Carries out the calls of fronts, and steps the core while it has work."""

    def __init__(self, settings: WorkerSettings, device: int, address: str) -> None:
        from worker.engines.vllm.core_link import CoreServer

        self._backend = make_core_backend(settings, device, executor)
        at_once = {
            "memory": self._backend.memory,
            "read_sensors": self._backend.read_sensors,
            "is_worn": lambda: self._core is not None and self._core.is_worn,
        }
        self._server = CoreServer(address, at_once)
        self._core: Any = None
        self._loaded: tuple[ModelSpec, RankGroup | None] | None = None
        self._is_frozen = False
        self._phases_s: dict[str, float] | None = None

    def run(self) -> None:
        """Run until the controller dies, or an error that leaves the device in doubt."""
        from worker.engines.vllm.core_link import Kind, error_of

        threading.Thread(target=_die_with_controller, daemon=True).start()
        try:
            while True:
                self._turn()
        except Exception as error:
            log.exception("the core ends")
            self._server.put(Kind.FAULT, error_of(error))
            self._server.flush(_FLUSH_S)
            raise SystemExit(1) from None

    @property
    def _has_work(self) -> bool:
        return self._core is not None and not self._is_frozen and self._core.has_work

    def _turn(self) -> None:
        from worker.engines.vllm.core_link import Kind

        inbox = self._server.inbox
        try:
            self._take(*inbox.get(block=not self._has_work))
            while True:
                self._take(*inbox.get_nowait())
        except queue.Empty:
            pass
        if not self._has_work:
            return
        outputs = self._core.step()
        if outputs is not None:
            self._server.put(Kind.OUTPUTS, outputs)
        if refused := self._core.refused():
            self._server.put(Kind.REFUSED, refused)

    def _take(self, kind: Any, value: Any, front: Any) -> None:
        from worker.engines.vllm.core_link import Kind, error_of

        core = self._core
        match kind:
            case Kind.ADD:
                if core is not None:
                    core.add(value)
            case Kind.ABORT:
                if core is not None:
                    core.abort(value)
            case Kind.CALL:
                number, method, arguments = value
                made, fault = None, None
                try:
                    made = self._call(method, arguments)
                except Exception as error:
                    log.debug("%s", method, exc_info=True)
                    fault = error_of(error)
                self._server.put(Kind.ANSWER, (number, made, fault), front)
            case None:  # the front is gone
                self._is_frozen = False
                if core is not None:
                    core.abort_all()

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        match method:
            case "warm_up":
                if self._phases_s is None:
                    self._phases_s = self._backend.warm_up()
                return self._phases_s
            case "load":
                return self._load(*arguments)
            case "attend":
                return self._backend.attend(*arguments)
            case "freeze":
                [self._is_frozen] = arguments
            case "close":
                core, self._core, self._loaded, self._server.core = self._core, None, None, None
                if core is not None:
                    core.close(*arguments)
            case _:
                return getattr(self._core, method)(*arguments)
        return None

    def _load(self, spec: ModelSpec, group: RankGroup | None, weights: str) -> Any:
        """Load a model, unless a front before this one has."""
        if self._core is not None and self._loaded != (spec, group):
            self._call("close", (0,))
        if self._core is None:
            self._core = self._server.core = self._backend.load_core(spec, group, weights)
            self._loaded = spec, group
        return self._core.info


def _die_with_controller() -> None:
    controller = multiprocessing.parent_process()
    if controller is not None:
        controller.join()
        os._exit(1)
