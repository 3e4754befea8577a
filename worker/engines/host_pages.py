"""Returns the memory of a model to the operating system, on a host without a GPU.

vLLM's CPU worker ignores vLLM's sleep mode. These functions run in each rank, with its worker.
They release pages in place (Linux: ``MADV_DONTNEED``): addresses stay valid and read as zeros until
they are written. Pages at the ends of a tensor stay, because other data may share them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from worker.engines import Unsupported
from worker.engines.vllm.warm_base import give_back

#: Attribute of a layer: a function that holds the weights packed by oneDNN.
_PACKED: Final = "cpu_linear"
#: Attribute of a model: its parts that are gone until a reload.
_AWAY: Final = "_tokenyard_away"


@dataclass(frozen=True, slots=True)
class _Away:
    """Names of parameters, and of layers with packed weights."""

    parameters: tuple[str, ...]
    packed: tuple[str, ...]


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
    setattr(model, _AWAY, _Away(tuple(parameters), tuple(packed)))
    give_back()


def check_weights(worker: Any) -> None:
    """Raise `RuntimeError` if vLLM's reload has not restored all released weights."""
    model = worker.model_runner.get_model()
    away: _Away = vars(model).pop(_AWAY)
    parameters, layers = dict(model.named_parameters()), dict(model.named_modules())
    lost = [name for name in away.parameters if not parameters[name].any()]
    lost += [name for name in away.packed if not hasattr(layers[name], _PACKED)]
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
