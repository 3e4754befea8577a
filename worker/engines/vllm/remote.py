"""The backend of a front: its core, in another process, has the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from worker.engines import Engine, Memory, RankGroup, SensorReading
from worker.engines.stopwatch import Stopwatch
from worker.engines.vllm.grammars import GrammarLimits
from worker.models import ModelSpec

if TYPE_CHECKING:
    from worker.engines.vllm.core_link import SocketLink


class RemoteBackend:
    """See `worker.engines.Backend`; what it does, the core at ``address`` does."""

    def __init__(
        self, address: str, *, timeout_s: float, log_stats: bool, grammars: GrammarLimits
    ) -> None:
        """``timeout_s`` is the longest wait for a core that is starting."""
        self._address = address
        self._timeout_s = timeout_s
        self._log_stats = log_stats
        self._grammars = grammars
        self._link: SocketLink | None = None
        self._inherited = 0  # bytes, shared with the fork-server

    def warm_up(self) -> dict[str, float]:
        """See `worker.engines.Backend.warm_up`."""
        import psutil  # vLLM brings it

        from worker.engines.vllm.backend import FIRST_MODEL, HEAP, run_first_model, settle
        from worker.engines.vllm.core_link import SocketLink

        self._link = link = SocketLink(self._address, self._timeout_s)
        memory = psutil.Process().memory_full_info()  # takes 7 ms
        self._inherited = memory.rss - memory.uss
        begun_s: dict[str, float] | None = link.call("begin_warm_up")
        if begun_s is None:
            return {}  # the front before this one has brought the first model
        stopwatch = Stopwatch()
        stopwatch.phases_s |= begun_s
        with stopwatch.phase(FIRST_MODEL):
            run_first_model(self, timeout_s=self._timeout_s)
        with stopwatch.phase(HEAP):
            link.call("settle")
            settle()
        return stopwatch.phases_s

    def load(self, spec: ModelSpec, group: RankGroup | None = None, weights: str = "") -> Engine:
        """See `worker.engines.Backend.load`."""
        from worker.engines.vllm.engine import VllmEngine

        link = self._connected()
        info = link.call("load", spec, group, weights)
        return VllmEngine(spec, link, info, log_stats=self._log_stats, grammars=self._grammars)

    def attend(self, group: RankGroup) -> None:
        """See `worker.engines.Backend.attend`."""
        self._connected().call("attend", group)

    def memory(self) -> Memory:
        """That of the core, and what this process has of its own."""
        import psutil

        core: Memory = self._connected().call("memory")
        own = psutil.Process().memory_info().rss - self._inherited
        return replace(core, host=core.host + own)

    def read_sensors(self) -> SensorReading:
        """See `worker.engines.Backend.read_sensors`."""
        if self._link is None:
            return SensorReading()
        reading: SensorReading = self._link.call("read_sensors")
        return reading

    def _connected(self) -> SocketLink:
        if self._link is None:
            raise RuntimeError("the core is not warm")
        return self._link
