"""vLLM's executor for one process, which also measures each phase of a load.

Pass it as vLLM's ``distributed_executor_backend``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from worker.engines.stopwatch import Stopwatch

#: The phase of a load that makes the executor and all of vLLM's engine.
EXECUTOR: Final = "executor"
#: Methods of the worker that the executor calls at its start, with their phases.
_PHASES: Final = {"init_worker": "device", "init_device": "device", "load_model": "weights"}
DEFAULT_KV_CACHE_BYTES: Final = 1024**3


class SingleExecutor(UniProcExecutor):
    """One worker, in this process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._stopwatch = Stopwatch()
        self.phases_s = self._stopwatch.phases_s
        super().__init__(vllm_config)

    @property
    def driver_worker(self) -> Any:
        """The worker; vLLM sets it and then starts it step by step."""
        return self._driver_worker

    @driver_worker.setter
    def driver_worker(self, worker: Any) -> None:
        self._driver_worker = _Timed(worker, self._stopwatch)

    def _init_executor(self) -> None:
        super()._init_executor()
        self._driver_worker = self._driver_worker.worker

    def determine_available_memory(self) -> list[int]:
        """Bytes for the KV cache."""
        with self._stopwatch.phase("kv cache"):
            return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocate the KV cache."""
        with self._stopwatch.phase("kv cache"):
            super().initialize_from_config(kv_cache_configs)


class ThriftyExecutor(SingleExecutor):
    """One worker on a CPU, with a KV cache no larger than all concurrent sequences can fill.

    For models without a configured size; the limit is `DEFAULT_KV_CACHE_BYTES`. To clear a GiB that
    a tiny model never uses takes longer than the rest of its load.
    """

    def determine_available_memory(self) -> list[int]:
        """Bytes for the KV cache."""
        return at_most_for_all(self, super().determine_available_memory())


def at_most_for_all(executor: Executor, available: list[int]) -> list[int]:
    """The bytes of each rank's KV cache, at most enough for all sequences at full length.

    One sequence is added for the blocks that vLLM reserves.
    """
    config = executor.vllm_config
    sequences = config.scheduler_config.max_num_seqs + 1
    return [
        min(there, sequences * sum(spec.max_memory_usage_bytes(config) for spec in specs.values()))
        for there, specs in zip(available, executor.get_kv_cache_specs(), strict=True)
    ]


def with_inner_phases(phases_s: Mapping[str, float], executor: Any) -> dict[str, float]:
    """Seconds by phase, with the executor's own phases taken out of `EXECUTOR`.

    An executor with phases, for instance that of a group, has a dict ``phases_s``.
    """
    inner: Mapping[str, float] = getattr(executor, "phases_s", {})
    found: dict[str, float] = {}
    for phase, seconds in phases_s.items():
        found[phase] = seconds
        if phase == EXECUTOR:
            found[phase] -= sum(inner.values())
            found |= inner
    return found


class _Timed:
    """Wraps a worker and times the phases of its start."""

    def __init__(self, worker: Any, stopwatch: Stopwatch) -> None:
        self.worker = worker
        self._stopwatch = stopwatch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.worker, name)
        phase = _PHASES.get(name)
        return found if phase is None else self._timed(phase, found)

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with self._stopwatch.phase(phase):
                return method(*args, **named)

        return call
