"""vLLM with front and core in one process and thread, so that a test sees both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from worker.engines import Engine, RankGroup
from worker.engines.stopwatch import Stopwatch
from worker.engines.vllm.backend import FIRST_MODEL, HEAP, CoreBackend, run_first_model, settle
from worker.models import ModelSpec

if TYPE_CHECKING:
    from worker.engines.vllm.core import Core


class InProcessBackend:
    """See `worker.engines.Backend`; ``core`` is the backend of its cores."""

    def __init__(self, core: CoreBackend) -> None:
        self._core = core
        self.attend = core.attend
        self.memory = core.memory
        self.read_sensors = core.read_sensors

    def warm_up(self) -> dict[str, float]:
        """What core and front do together."""
        stopwatch = Stopwatch()
        self._core.begin_warm_up(stopwatch)
        with stopwatch.phase(FIRST_MODEL):
            run_first_model(self)
        with stopwatch.phase(HEAP):
            settle()
        return stopwatch.phases_s

    def load(self, spec: ModelSpec, group: RankGroup | None = None, weights: str = "") -> Engine:
        """Load an engine."""
        core = self._core.load(spec, group, weights)
        from worker.engines.vllm.engine import VllmEngine

        return VllmEngine(spec, LocalLink(core), core.info)


class LocalLink:
    """See `worker.engines.vllm.core_link.SocketLink`; its steps are the core's."""

    has_outputs = True

    def __init__(self, core: Core) -> None:
        self._core = core
        self.refused = core.refused
        self.abort_requests = core.abort
        self.get_supported_tasks = core.supported_tasks
        self.reset_mm_cache = core.reset_mm_cache

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._core, method)(*arguments)

    def listen(self, wake: Callable[[], None]) -> None:
        """Outputs come by steps only."""

    def add_request(self, request: Any) -> None:
        self._core.add(self._core.preprocess(request))

    def get_output(self) -> Any:
        from vllm.v1.engine import EngineCoreOutputs

        return self._core.step() or EngineCoreOutputs()

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """The core is closed by the engine."""
