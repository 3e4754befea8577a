"""What an engine computes with: the weights of its model, and its adapters beside them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vllm import LLMEngine
from vllm.lora.request import LoRARequest

from worker.engines import Unsupported

log = logging.getLogger("tokenyard.worker.engines")

Adapters = Mapping[str, LoRARequest]


def exchange_weights(engine: LLMEngine, folder: str, before: str, adapters: Adapters) -> None:
    """Read the weights of ``folder`` in place, on every rank.

    All that has been computed with those before is forgotten, that of running requests too.
    Raises `Unsupported` where they cannot be read, and those of the folder ``before`` could be
    read again.
    """
    try:
        _take(engine, folder, adapters)
    except Exception as error:
        log.exception("weights of %s: going back to those of %s", folder, before)
        _take(engine, before, adapters)
        raise Unsupported(f"{folder}: {type(error).__name__}: {error}") from error


def _take(engine: LLMEngine, folder: str, adapters: Adapters) -> None:
    remove_adapters(engine, adapters)  # vLLM drops them with the weights, without a word
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    add_adapters(engine, adapters)
    engine.reset_prefix_cache(reset_running_requests=True)


def add_adapters(engine: LLMEngine, adapters: Adapters) -> None:
    """Read all adapters, so that a broken one shows before a request asks for it."""
    for name, request in adapters.items():
        try:
            engine.add_lora(request)
        except Exception as error:
            raise ValueError(f"adapter {name} cannot be loaded: {error}") from error


def remove_adapters(engine: LLMEngine, adapters: Adapters) -> None:
    """Forget all adapters; they can be added again."""
    for request in adapters.values():
        engine.remove_lora(request.lora_int_id)
