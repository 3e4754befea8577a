"""How an engine lets go of its device and takes it again.

On a GPU by vLLM's sleep mode: at level 1 the weights move to the host's memory, at level 2 they
are thrown away; the KV cache goes at both. On a CPU there is nowhere to move to: at level 1 the
pages of the KV cache go back to the operating system, at level 2 those of the weights as well.
After level 2 the weights are read from their files again: without that an engine that wakes talks
nonsense (vLLM issue 29341).
"""

from __future__ import annotations

from typing import Final, Protocol

from vllm import LLMEngine
from vllm.platforms import current_platform

from worker.engines.host_pages import check_system, check_weights, release_cache, release_weights
from worker.models import ModelSpec

LEVELS: Final = (1, 2)
#: The level at which the weights are lost.
_LOSES_WEIGHTS: Final = 2


class SleepMode(Protocol):
    """How an engine sleeps."""

    def begin(self, engine: LLMEngine, level: int) -> None:
        """Let go of the memory; raises `Unsupported` before anything is lost."""

    def end(self, engine: LLMEngine, level: int) -> None:
        """Take the memory again, as it was."""

    def prepare_end(self, engine: LLMEngine) -> None:
        """Make an engine that sleeps ready to be unloaded."""


class DeviceSleep:
    """vLLM's own sleep mode."""

    def begin(self, engine: LLMEngine, level: int) -> None:
        """See `SleepMode`."""
        engine.sleep(level)

    def end(self, engine: LLMEngine, level: int) -> None:
        """See `SleepMode`; weights come first, while there is room to pack them."""
        if level < _LOSES_WEIGHTS:
            engine.wake_up()
            return
        engine.wake_up(["weights"])
        engine.collective_rpc("reload_weights")
        engine.wake_up(["kv_cache"])

    def prepare_end(self, engine: LLMEngine) -> None:
        """Wake it: vLLM unmaps what it frees, and what is not mapped then is a CUDA error."""
        engine.wake_up()


class HostSleep:
    """Pages of the host's memory."""

    def begin(self, engine: LLMEngine, level: int) -> None:
        """See `SleepMode`."""
        check_system()
        engine.collective_rpc(release_cache)
        if level >= _LOSES_WEIGHTS:
            engine.collective_rpc(release_weights)

    def end(self, engine: LLMEngine, level: int) -> None:
        """See `SleepMode`; pages come by themselves as they are written."""
        if level >= _LOSES_WEIGHTS:
            engine.collective_rpc("reload_weights")
            engine.collective_rpc(check_weights)

    def prepare_end(self, engine: LLMEngine) -> None:
        """Nothing: there is a page wherever one is needed."""


def choose_sleep(spec: ModelSpec) -> SleepMode | None:
    """How an engine of this model sleeps here; None where it cannot."""
    if current_platform.is_cpu():
        return HostSleep()
    if spec.sleep_level and current_platform.is_sleep_mode_available():
        return DeviceSleep()
    return None
