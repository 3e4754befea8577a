"""Frees the device of an engine while it sleeps.

On a GPU this is vLLM's sleep mode: both levels drop the KV cache, level 1 moves the weights to host
memory, and level 2 drops them. On a CPU there is no other memory: level 1 returns the pages of the
KV cache to the operating system, level 2 also those of the weights. After level 2 the engine reads
the weights from their files again: otherwise it generates nonsense (vLLM issue 29341).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore

from worker.engines import Unsupported
from worker.engines.vllm.warm_base import give_back
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.engines")

LEVELS: Final = (1, 2)
#: From this level on, sleep drops the weights.
_LOSES_WEIGHTS: Final = 2
#: Attribute of a layer: a function that holds the weights packed by oneDNN.
_PACKED: Final = "cpu_linear"
#: Attribute of a model: names of its parameters, and of its layers with packed weights, that are
#: gone until a reload.
_AWAY: Final = "_tokenyard_away"


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


# Returns the memory of a model to the operating system, on a host without a GPU.
#
# vLLM's CPU worker ignores vLLM's sleep mode. These functions run in each rank, with its worker.
# They release pages in place (Linux: ``MADV_DONTNEED``): addresses stay valid and read as zeros
# until they are written. Pages at the ends of a tensor stay, because other data may share them.


def check_system() -> None:
    """Raise `Unsupported` if this system cannot release pages."""
    if sys.platform != "linux":
        raise Unsupported("an engine on a CPU sleeps on Linux only; unload the model instead")


def release_cache(worker: Any) -> None:
    """Release the pages of the KV cache; the caller must clear its prefix cache."""
    for tensor in _tensors(worker.model_runner.kv_caches):
        _release(tensor)


def release_weights(worker: Any) -> None:
    """Release the pages of the weights; reload them before use, then call `check_weights`.

    Drops the functions in which linear layers keep packed weights. Keeps parameters that are all
    zeros, as a rank's share of a small vocabulary can be: a reload finds nothing for them.
    """
    model = worker.model_runner.get_model()
    parameters = {name: each for name, each in model.named_parameters() if each.any()}
    packed = {name: layer for name, layer in model.named_modules() if _is_packed(layer)}
    for layer in packed.values():
        delattr(layer, _PACKED)
    for parameter in parameters.values():
        _release(parameter)
    setattr(model, _AWAY, (list(parameters), list(packed)))
    give_back()


def check_weights(worker: Any) -> None:
    """Raise `RuntimeError` if vLLM's reload has not restored all released weights."""
    model = worker.model_runner.get_model()
    released, unpacked = vars(model).pop(_AWAY)
    parameters, layers = dict(model.named_parameters()), dict(model.named_modules())
    lost: list[str] = [name for name in released if not parameters[name].any()]
    lost += [name for name in unpacked if not hasattr(layers[name], _PACKED)]
    if lost:
        raise RuntimeError(
            f"{len(lost)} parts have no weights after the reload, {lost[0]} first; load it again"
        )


def _is_packed(layer: torch.nn.Module) -> bool:
    """Whether the layer has packed weights that are not all zeros."""
    if _PACKED not in vars(layer):
        return False
    weight: torch.Tensor | None = getattr(layer, "weight", None)
    return weight is None or not weight.numel() or bool(weight.any())


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    """All tensors of a nested list."""
    if isinstance(found, torch.Tensor):
        yield found
        return
    for each in found:
        yield from _tensors(each)


def _release(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(last - first)
    if libc.madvise(ctypes.c_void_p(first), length, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "pages of a model cannot be given back")
