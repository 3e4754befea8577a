"""The loop of a process that has the device.

Nothing of ours runs beside its steps but the socket to its front.
"""

from __future__ import annotations

import logging
import queue
from contextlib import ExitStack
from typing import Any, Final

from worker.engines import RankGroup
from worker.engines.stopwatch import Stopwatch
from worker.engines.vllm.backend import CoreBackend, settle
from worker.engines.vllm.core import Core, CoreInfo
from worker.engines.vllm.core_link import CoreServer, Frames, Kind, error_of
from worker.engines.vllm.warm_base import no_kernel_warnings
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.core")

_FLUSH_S: Final = 1.0


class CoreProcess:
    """Carries out the calls of fronts, and steps the core while it has work."""

    def __init__(self, backend: CoreBackend, address: str) -> None:
        """``address`` is that of the Unix socket for its front."""
        self._backend = backend
        at_once = {
            "memory": backend.memory,
            "read_sensors": backend.read_sensors,
            "is_worn": lambda: self._core is not None and self._core.is_worn(),
        }
        self._server = CoreServer(address, at_once)
        self._core: Core | None = None
        self._loaded: tuple[ModelSpec, RankGroup | None] | None = None
        self._phases_s: dict[str, float] | None = None
        self._is_settled = False
        self._warming = ExitStack()  # around the steps of the first model

    def run(self) -> None:
        """Run until an error that leaves the device in doubt."""
        try:
            while True:
                self._turn()
        except Exception as error:
            log.exception("the core ends")
            self._server.put(Kind.FAULT, error_of(error))
            self._server.flush(_FLUSH_S)
            raise SystemExit(1) from None

    def _turn(self) -> None:
        """Take what the front has sent, then step the core; wait while it has no work."""
        inbox = self._server.inbox
        try:
            self._take(*inbox.get(block=self._core is None or not self._core.has_work))
            while True:
                self._take(*inbox.get_nowait())
        except queue.Empty:
            pass
        core = self._core
        if core is None or not core.has_work:
            return
        outputs = core.step()
        if outputs is not None:
            self._server.put(Kind.OUTPUTS, outputs)
        if refused := core.refused():
            self._server.put(Kind.REFUSED, refused)

    def _take(self, kind: Kind | None, value: Any, front: Frames) -> None:
        core = self._core
        match kind:
            case Kind.ADD if core is not None:
                core.add(value)
            case Kind.ABORT if core is not None:
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
            case None if core is not None:  # the front is gone
                core.freeze(False)
                core.abort_all()

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        match method:
            case "begin_warm_up":
                return self._begin_warm_up()
            case "settle":
                self._warming.close()
                settle()
                self._is_settled = True
                return None
            case "load":
                return self._load(*arguments)
            case "attend":
                return self._backend.attend(*arguments)
            case "close":
                return self._close(*arguments)
            case _:
                return getattr(self._core, method)(*arguments)

    def _begin_warm_up(self) -> dict[str, float] | None:
        """Its phases; None after the first model, which the front brings."""
        if self._is_settled:
            return None
        if self._phases_s is None:
            stopwatch = Stopwatch()
            self._backend.begin_warm_up(stopwatch)
            self._phases_s = stopwatch.phases_s
            self._warming.enter_context(no_kernel_warnings())
        return self._phases_s

    def _load(self, spec: ModelSpec, group: RankGroup | None, weights: str) -> CoreInfo:
        """Load a model, unless a front before this one has."""
        if self._loaded != (spec, group):
            self._close(0)
        if self._core is None:
            self._core = self._server.core = self._backend.load(spec, group, weights)
            self._loaded = spec, group
        return self._core.info

    def _close(self, asleep: int) -> None:
        core, self._core, self._loaded, self._server.core = self._core, None, None, None
        if core is not None:
            core.close(asleep)
