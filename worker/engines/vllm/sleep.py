"""Frees the device of an engine while it sleeps.

On a GPU this is vLLM's sleep mode: both levels drop the KV cache, level 1 moves the weights to host
memory, and level 2 drops them. On a CPU there is no other memory: level 1 returns the pages of the
KV cache to the operating system, level 2 also those of the weights. After level 2 the engine reads
the weights from their files again: otherwise it generates nonsense (vLLM issue 29341).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore

from worker.engines import Unsupported
from worker.engines.host_pages import check_system, check_weights, release_cache, release_weights
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.engines")

LEVELS: Final = (1, 2)
#: From this level on, sleep drops the weights.
_LOSES_WEIGHTS: Final = 2


def can_sleep(spec: ModelSpec) -> bool:
    """Whether a model can sleep on this device."""
    if current_platform.is_cpu():
        return True
    return bool(spec.sleep_level) and current_platform.is_sleep_mode_available()


def fall_asleep(engine: EngineCore, level: int) -> None:
    """Free the memory; raises `Unsupported` before it frees anything."""
    if not current_platform.is_cpu():
        engine.sleep(level)
        return
    check_system()
    engine.collective_rpc(release_cache)
    if level >= _LOSES_WEIGHTS:
        engine.collective_rpc(release_weights)


def wake_up(engine: EngineCore, level: int) -> None:
    """Take the memory again and restore the weights."""
    is_on_cpu, has_weights = current_platform.is_cpu(), level < _LOSES_WEIGHTS
    if is_on_cpu and not has_weights:  # the kernel supplies pages on the first write
        engine.collective_rpc("reload_weights")
        engine.collective_rpc(check_weights)
    elif not is_on_cpu and has_weights:
        engine.wake_up()
    elif not is_on_cpu:  # the weights first, while there is room to pack them
        engine.wake_up(["weights"])
        engine.collective_rpc("reload_weights")
        engine.wake_up(["kv_cache"])


# Exchanges the weights of an engine, and adds and removes its adapters.

Adapters = Mapping[str, LoRARequest]


def exchange_weights(engine: EngineCore, folder: str, before: str, adapters: Adapters) -> None:
    """Load the weights in ``folder`` in place, on every rank.

    Drops the KV cache, including that of running requests. If the weights cannot be loaded, loads
    those in ``before`` again and raises `Unsupported`; other errors mean that this failed too.
    """
    try:
        _take(engine, folder, adapters)
    except Exception as error:
        log.exception("weights of %s: going back to those of %s", folder, before)
        _take(engine, before, adapters)
        raise Unsupported(f"{folder}: {type(error).__name__}: {error}") from error


def _take(engine: EngineCore, folder: str, adapters: Adapters) -> None:
    remove_adapters(engine, adapters)  # vLLM silently drops them with the weights
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    add_adapters(engine, adapters)
    engine.reset_prefix_cache(reset_running_requests=True)


def add_adapters(engine: EngineCore, adapters: Adapters) -> None:
    """Load all adapters; raises `ValueError` with the name of one that cannot be loaded.

    This finds a broken adapter before a request uses it.
    """
    for name, request in adapters.items():
        try:
            engine.add_lora(request)
        except Exception as error:
            raise ValueError(f"adapter {name} cannot be loaded: {error}") from error


def remove_adapters(engine: EngineCore, adapters: Adapters) -> None:
    """Unload all adapters; they can be added again."""
    for request in adapters.values():
        engine.remove_lora(request.lora_int_id)
