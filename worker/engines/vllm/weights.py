"""Exchanges the weights of an engine, and adds and removes its adapters."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vllm import LLMEngine
from vllm.lora.request import LoRARequest

from worker.engines import Unsupported

log = logging.getLogger("tokenyard.worker.engines")

Adapters = Mapping[str, LoRARequest]


def exchange_weights(engine: LLMEngine, folder: str, before: str, adapters: Adapters) -> None:
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


def _take(engine: LLMEngine, folder: str, adapters: Adapters) -> None:
    remove_adapters(engine, adapters)  # vLLM silently drops them with the weights
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    add_adapters(engine, adapters)
    engine.reset_prefix_cache(reset_running_requests=True)


def add_adapters(engine: LLMEngine, adapters: Adapters) -> None:
    """Load all adapters; raises `ValueError` with the name of one that cannot be loaded.

    This finds a broken adapter before a request uses it.
    """
    for name, request in adapters.items():
        try:
            engine.add_lora(request)
        except Exception as error:
            raise ValueError(f"adapter {name} cannot be loaded: {error}") from error


def remove_adapters(engine: LLMEngine, adapters: Adapters) -> None:
    """Unload all adapters; they can be added again."""
    for request in adapters.values():
        engine.remove_lora(request.lora_int_id)
