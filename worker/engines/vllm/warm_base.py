"""Keeps what a warm process has imported out of the way while engines come and go.

A process that has imported vLLM holds some 670,000 objects that Python's garbage collector looks
at. vLLM calls the collector five times to load a model and three times to let go of it, and calls
`gc.unfreeze`, after which all of them count again: two seconds for a model that loads in a fifth
of one. So what is there before the first model is frozen (`freeze`), and stays so while vLLM loads
and unloads (`held_back`). An engine's own objects, some 3,000, are never frozen: they are
collected as soon as the engine is gone. docs/decisions/0010-warm-base.md has the figures.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, MutableMapping
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
    """Imports make many objects and next to no garbage: looking for it takes two seconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze() -> None:
    """Collect what is garbage, and never look at the rest again."""
    gc.collect()
    gc.freeze()


@contextmanager
def held_back(*, has_kernels: bool) -> Iterator[None]:
    """While vLLM loads a model or lets go of it: the base stays frozen and is not searched again.

    Three functions do nothing meanwhile: `gc.freeze`, `gc.unfreeze`, and, where a first model has
    been loaded (``has_kernels``), the search of all modules by which vLLM's CPU platform puts its
    own functions in the place of Triton kernels; the first one has found them all, and modules
    that are imported later import what it put there. Where vLLM has no such function, or calls
    none of them, nothing changes.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(gc, "freeze", _do_nothing))
        stack.enter_context(_replaced(gc, "unfreeze", _do_nothing))
        stack.enter_context(_own_excepthook())
        stack.enter_context(unmonitored())
        platform = _platform()
        # Of its class: a platform itself warns of what it has not.
        if has_kernels and hasattr(type(platform), _KERNELS):
            stack.enter_context(_replaced(platform, _KERNELS, _do_nothing))
        yield


@contextmanager
def unmonitored() -> Iterator[None]:
    """While a process warms up or loads, to compile kernels is no surprise.

    vLLM warns of each that is compiled behind the warm-up of the first engine of a process.
    """
    monitor = sys.modules.get(_MONITOR)
    if not hasattr(monitor, _EVENT):
        yield
        return
    with _replaced(monitor, _EVENT, _do_nothing):
        yield


def let_go() -> None:
    """Leave vLLM's process groups and return what nobody holds any more; idempotent.

    Raises `DeviceLost` where something of a model stays in the memory of vLLM's sleep mode.
    """
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    _forget_models()
    _forget_graphs()
    _forget_sleep_memory()
    cleanup_dist_env_and_memory()
    give_back()
    torch.cuda.empty_cache()  # what the last collection has freed; nothing without a GPU
    _check_sleep_memory()


def give_back() -> None:
    """Collect, and return freed memory to the operating system, where it can be told to take it."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(AttributeError):  # a libc other than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _forget_models() -> None:
    """Let go of what would keep a model, and all its weights, for ever; only while none is held.

    Two tables do (seen in vLLM 0.32). One is of layers whose weights have been reloaded: its keys
    are weak, but its values hold the keys. The other is of compiled models that hear what torch
    compiles: vLLM takes its model out only where more of the engine is alive than after a shutdown.
    """
    _known_in(_RELOADING, "LAYERWISE_INFO").clear()
    listeners = _known_in(_COMPILING, "_bytecode_hooks")
    for key, listener in list(listeners.items()):
        # A plain function is a hook of torch's own.
        cleanup = getattr(getattr(listener, "__self__", None), "cleanup", None)
        if cleanup is not None:
            cleanup()
            # A model whose class and base class are both compiled, as Qwen3's, listens twice, and
            # takes out one of them.
            listeners.pop(key, None)
    # With its first chat vLLM looks for a processor, and keeps one more tokenizer of each model.
    forget = getattr(sys.modules.get(_PROCESSORS), "cached_get_processor", None)
    if forget is not None:
        forget.cache_clear()


def _forget_graphs() -> None:
    """Let go of all CUDA graphs, and of the pool of memory that they share.

    vLLM names one pool for as long as a process lives. But with its last graph torch gives a pool
    up, and the next model could not record its graphs into it ("use_count > 0 INTERNAL ASSERT
    FAILED"). So each model has a pool of its own.
    """
    for module, name in _GRAPHS:
        clear = getattr(getattr(sys.modules.get(module), name, None), "clear_all_graphs", None)
        if clear is not None:
            clear()
    platform = type(_platform())
    if hasattr(platform, _POOL):
        setattr(platform, _POOL, None)


def _forget_sleep_memory() -> None:
    """Let go of the pools of vLLM's sleep mode, as vLLM itself does of those of whole engines."""
    keep_allocators()
    instance = _sleep_memory()
    if instance is not None:
        instance.release_pools()


def keep_allocators() -> None:
    """Keep what the memory of vLLM's sleep mode comes from, a few bytes for each load, for ever.

    vLLM lets go of it with the engine. But memory that a compiled model or its graphs still hold at
    that moment goes back through it later, and that of a process without it ends in a crash.
    """
    pools = getattr(_sleep_memory(), "allocator_and_pools", {})
    for entry in pools.values():
        # Pool and allocator in vLLM 0.26, a list of such pairs in 0.32.
        pairs = entry if isinstance(entry, list) else [entry]
        _kept.extend(allocator for _, allocator in pairs)


def _sleep_memory() -> Any:
    """The allocator of vLLM's sleep mode; None where no model has used it."""
    allocator = getattr(sys.modules.get(_SLEEP_MEMORY), "CuMemAllocator", None)
    return getattr(allocator, "instance", None)


def _check_sleep_memory() -> None:
    """See that nothing is left there: vLLM would refuse each model that can sleep."""
    instance = _sleep_memory()
    left = instance.get_current_usage() if instance is not None else 0
    if left:
        raise DeviceLost(f"{left / 1024**2:.0f} MiB of a model that is gone stay on the GPU")


def _known_in(module: str, name: str) -> MutableMapping[Any, Any]:
    """A table of a module; an empty one where the module is not loaded, or has none."""
    found: MutableMapping[Any, Any] = getattr(sys.modules.get(module), name, {})
    return found


def _do_nothing(*_: object, **__: object) -> None:
    return


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


@contextmanager
def _own_excepthook() -> Iterator[None]:
    """Take off what torch puts around it for each model: one more "[rank0]" before every line."""
    kept = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = kept


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., None]) -> Iterator[None]:
    """Another function under this name for a while."""
    kept = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if kept is None:
            delattr(owner, name)  # it was a class's, and is so again
        else:
            setattr(owner, name, kept)
