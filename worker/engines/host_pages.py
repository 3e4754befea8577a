"""Gives the memory of a model back to the operating system, on a host without a GPU.

vLLM's CPU worker ignores its sleep mode. These functions run in each rank, with its worker. Pages
are given back in place (Linux: ``MADV_DONTNEED``), so every address stays valid: what is read next
is zeros until somebody writes. The pages at the ends of a tensor, which it may share with others,
stay.
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

_PACKED: Final = (
    "cpu_linear"  # a layer's own function, which holds its weights as oneDNN packs them
)
_AWAY: Final = "_tokenyard_away"  # what of a model is gone until a reload


@dataclass(frozen=True, slots=True)
class _Away:
    """Names of parameters, and of layers with packed weights."""

    parameters: tuple[str, ...]
    packed: tuple[str, ...]


def check_system() -> None:
    """Raises `Unsupported` where pages cannot be given back."""
    if sys.platform != "linux":
        raise Unsupported("an engine on a CPU sleeps on Linux only; unload the model instead")


def release_cache(worker: Any) -> None:
    """Give the pages of the KV cache back; every prefix cache of it must be forgotten."""
    for tensor in _tensors(worker.model_runner.kv_caches):
        _release(tensor)


def release_weights(worker: Any) -> None:
    """Give the pages of the weights back; they must be reloaded, and then be checked.

    Linear layers keep their weights in packed form inside a function, which is dropped. A rank's
    share of a small vocabulary can be all zeros, for which a reload finds nothing: it stays.
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
    """Raises `RuntimeError` where vLLM's reload has not brought back all that was given back."""
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
    """Whether it has packed weights that are worth their memory."""
    if _PACKED not in vars(layer):
        return False
    weight: torch.Tensor | None = getattr(layer, "weight", None)
    return weight is None or not weight.numel() or bool(weight.any())


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    """All tensors of a list in which some layers have lists of their own."""
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
