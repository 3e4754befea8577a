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
from typing import Any, Final

import torch

from worker.engines import Unsupported
from worker.engines.warm_base import give_back

_PACKED: Final = (
    "cpu_linear"  # a layer's own function, which holds its weights as oneDNN packs them
)
_LOST: Final = "_tokenyard_lost_weights"


def check_system() -> None:
    """Raises `Unsupported` where pages cannot be given back."""
    if sys.platform != "linux":
        raise Unsupported("an engine on a CPU sleeps on Linux only; unload the model instead")


def release_cache(worker: Any) -> None:
    """Give the pages of the KV cache back; every prefix cache of it must be forgotten."""
    for tensor in _tensors(worker.model_runner.kv_caches):
        _release(tensor)


def release_weights(worker: Any) -> None:
    """Give the pages of the weights back; `check_weights` says whether a reload has healed them.

    Linear layers keep their weights in packed form inside a function, which is dropped.
    """
    model = worker.model_runner.get_model()
    for layer in model.modules():
        if _PACKED in vars(layer):
            delattr(layer, _PACKED)
            setattr(layer, _LOST, True)
    for parameter in model.parameters():
        _release(parameter)
    give_back()


def check_weights(worker: Any) -> None:
    """Raises `RuntimeError` where vLLM's reload has not packed again what was dropped."""
    for name, layer in worker.model_runner.get_model().named_modules():
        if vars(layer).pop(_LOST, False) and not hasattr(layer, _PACKED):
            raise RuntimeError(f"{name} has no weights after the reload; load the model anew")


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
