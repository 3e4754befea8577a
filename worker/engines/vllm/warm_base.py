"""Hides the imports of a warm process from the garbage collector, and cleans up after engines.

A process that has imported vLLM holds about 670,000 objects, which Python's garbage collector
searches. vLLM calls the collector five times to load a model and three times to unload it, and
calls `gc.unfreeze`, which undoes a freeze. This takes two seconds, for a model that loads in 0.2 s.
So the objects of the imports are frozen before the first model (`freeze`), and stay frozen while
vLLM loads and unloads (`held_back`). The objects of an engine, about 3,000, are never frozen: they
are collected with the engine. docs/decisions/0010-warm-base.md has the measurements.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from worker.engines import DeviceLost

_KERNELS: Final = "register_triton_kernel_overrides"
_RELOADING: Final = "vllm.model_executor.model_loader.reload.layerwise"
_COMPILING: Final = "torch._dynamo.convert_frame"
_PROCESSORS: Final = "vllm.transformers_utils.processor"
_GRAPHS: Final = (
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper"),
    ("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphWrapper"),
)
_POOL: Final = "_global_graph_pool"
_MONITOR: Final = "vllm.utils.jit_monitor"
_EVENT: Final = "_handle_jit_event"
_SLEEP_MEMORY: Final = "vllm.device_allocator.cumem"

_kept: Final[list[object]] = []


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection, which takes two seconds of the imports and finds almost nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze() -> None:
    """Collect garbage, and exclude the remaining objects from later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def held_back(*, has_kernels: bool) -> Iterator[None]:
    """Keep the imports frozen while vLLM loads or unloads a model.

    Replaces three functions by ones that do nothing: `gc.freeze`, `gc.unfreeze` and, after the
    first load (``has_kernels``), the search of all modules in which vLLM's CPU platform replaces
    Triton kernels. The first search finds them all, and later imports get the replacements. If a
    version of vLLM lacks this function, the search is not replaced.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(gc, "freeze", _do_nothing))
        stack.enter_context(replaced(gc, "unfreeze", _do_nothing))
        # Restored afterwards: torch wraps it per model, which adds a "[rank0]" to every line.
        stack.enter_context(replaced(sys, "excepthook", sys.excepthook))
        stack.enter_context(no_kernel_warnings())
        platform = _platform()
        # Ask the class: a platform warns of attributes that it lacks.
        if has_kernels and hasattr(type(platform), _KERNELS):
            stack.enter_context(replaced(platform, _KERNELS, _do_nothing))
        yield


@contextmanager
def no_kernel_warnings() -> Iterator[None]:
    """Silence vLLM's warnings of compiled kernels during a warm-up or load.

    vLLM warns of each kernel that is compiled after the warm-up of a process's first engine.
    """
    monitor = sys.modules.get(_MONITOR)
    if not hasattr(monitor, _EVENT):
        yield
        return
    with replaced(monitor, _EVENT, _do_nothing):
        yield


def let_go() -> None:
    """Leave vLLM's process groups and free all memory of the last model; idempotent.

    Raises `DeviceLost` if part of a model stays in the memory of vLLM's sleep mode.
    """
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    _forget_models()
    _forget_graphs()
    _forget_sleep_memory()
    cleanup_dist_env_and_memory()
    give_back()
    torch.cuda.empty_cache()  # memory freed by the last collection; does nothing without a GPU
    _check_sleep_memory()


def give_back() -> None:
    """Collect garbage, and return freed memory to the operating system (with glibc only)."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(AttributeError):  # a libc other than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _forget_models() -> None:
    """Clear tables that keep a model and its weights forever; call only while no model is loaded.

    There are two (seen in vLLM 0.32). One has the layers with reloaded weights: its keys are weak,
    but its values hold the keys. The other has compiled models that listen to torch's compiler:
    vLLM removes its model only if more of the engine is alive than after a shutdown.
    """
    _known_in(_RELOADING, "LAYERWISE_INFO").clear()
    listeners = _known_in(_COMPILING, "_bytecode_hooks")
    for key, listener in list(listeners.items()):
        # A plain function is a hook of torch's own.
        cleanup = getattr(getattr(listener, "__self__", None), "cleanup", None)
        if cleanup is not None:
            cleanup()
            # If a model's class and base class are both compiled, as in Qwen3, the model listens
            # twice, and its cleanup removes only one listener.
            listeners.pop(key, None)
    # At a model's first chat vLLM looks for a processor, and caches another tokenizer with it.
    forget = getattr(sys.modules.get(_PROCESSORS), "cached_get_processor", None)
    if forget is not None:
        forget.cache_clear()


def _forget_graphs() -> None:
    """Free all CUDA graphs and the memory pool that they share.

    vLLM keeps one pool for the life of a process. But torch deletes a pool with its last graph, and
    then the next model cannot record graphs into it ("use_count > 0 INTERNAL ASSERT FAILED"). So
    each model gets its own pool.
    """
    for module, name in _GRAPHS:
        clear = getattr(getattr(sys.modules.get(module), name, None), "clear_all_graphs", None)
        if clear is not None:
            clear()
    platform = type(_platform())
    if hasattr(platform, _POOL):
        setattr(platform, _POOL, None)


def _forget_sleep_memory() -> None:
    """Free the pools of vLLM's sleep mode, which vLLM frees only for complete engines."""
    keep_allocators()
    instance = _sleep_memory()
    if instance is not None:
        instance.release_pools()


def keep_allocators() -> None:
    """Keep the allocators of vLLM's sleep mode forever; this costs a few bytes per load.

    vLLM deletes them with the engine. But a compiled model or its graphs may free memory later,
    and without its allocator that crashes the process.
    """
    pools = getattr(_sleep_memory(), "allocator_and_pools", {})
    for entry in pools.values():
        # Pool and allocator in vLLM 0.26, a list of such pairs in 0.32.
        pairs = entry if isinstance(entry, list) else [entry]
        _kept.extend(allocator for _, allocator in pairs)


def _sleep_memory() -> Any:
    """The allocator of vLLM's sleep mode; None if no model has used it."""
    allocator = getattr(sys.modules.get(_SLEEP_MEMORY), "CuMemAllocator", None)
    return getattr(allocator, "instance", None)


def _check_sleep_memory() -> None:
    """Raise `DeviceLost` if memory is left: vLLM would refuse each model that can sleep."""
    instance = _sleep_memory()
    left = instance.get_current_usage() if instance is not None else 0
    if left:
        raise DeviceLost(f"{left / 1024**2:.0f} MiB of a model that is gone stay on the GPU")


def _known_in(module: str, name: str) -> MutableMapping[Any, Any]:
    """A table of a module; empty if the module is not loaded or lacks it."""
    found: MutableMapping[Any, Any] = getattr(sys.modules.get(module), name, {})
    return found


def _do_nothing(*_: object, **__: object) -> None:
    return


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


@contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Replace the function ``name`` of ``owner`` in the block."""
    kept = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if kept is None:
            delattr(owner, name)  # it is an attribute of the class
        else:
            setattr(owner, name, kept)
