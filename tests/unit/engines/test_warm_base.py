"""The state of vLLM that is released between two models on a GPU: with fakes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from worker.engines import DeviceLost
from worker.engines.vllm import warm_base


class Wrapper:
    """vLLM's class, for one kind of graphs."""

    cleared: ClassVar[list[str]] = []

    @classmethod
    def clear_all_graphs(cls) -> None:
        """Count the call."""
        cls.cleared.append(cls.__name__)


class Breakable(Wrapper):
    """vLLM's class, for another kind."""


class Platform:
    """vLLM's class, with a pool as class attribute."""

    _global_graph_pool: Any = None


def module(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    """Make a module importable."""
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


def allocator(monkeypatch: pytest.MonkeyPatch, instance: object) -> None:
    """Make vLLM's allocator have this instance."""
    found = SimpleNamespace(instance=instance)
    module("vllm.device_allocator.cumem", monkeypatch, CuMemAllocator=found)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    """The platform after its first model has recorded graphs."""
    found = Platform()
    monkeypatch.setattr(Platform, "_global_graph_pool", (0, 1))
    monkeypatch.setattr(Wrapper, "cleared", [])
    monkeypatch.setattr(warm_base, "_platform", lambda: found)
    return found


def test_the_next_model_has_its_own_pool_of_graphs(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    module("vllm.compilation.cuda_graph", monkeypatch, CUDAGraphWrapper=Wrapper)
    module("vllm.compilation.breakable_cudagraph", monkeypatch, BreakableCUDAGraphWrapper=Breakable)

    warm_base._forget_graphs()

    assert Wrapper.cleared == ["Wrapper", "Breakable"]
    assert type(platform)._global_graph_pool is None


def test_a_vllm_without_such_graphs_or_pools_is_left_alone(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    module("vllm.compilation.cuda_graph", monkeypatch)
    monkeypatch.delitem(sys.modules, "vllm.compilation.breakable_cudagraph", raising=False)
    monkeypatch.delattr(Platform, "_global_graph_pool")

    warm_base._forget_graphs()

    assert not hasattr(platform, "_global_graph_pool")


@pytest.mark.parametrize("used", [0, 20 * 1024**2])
def test_memory_left_by_a_model_that_could_sleep_ends_the_process(
    used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = SimpleNamespace(get_current_usage=lambda: used, release_pools=lambda: None)
    allocator(monkeypatch, instance)

    if used:
        with pytest.raises(DeviceLost, match=r"^20 MiB of a model that is gone stay on the GPU$"):
            warm_base._check_sleep_memory()
    else:
        warm_base._check_sleep_memory()


def test_without_a_model_that_could_sleep_no_memory_counts_as_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator(monkeypatch, None)
    warm_base._check_sleep_memory()
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem")
    warm_base._check_sleep_memory()


@pytest.mark.parametrize(
    "entry", [("pool", "its allocator"), [("pool", "its allocator")]], ids=["0.26", "0.32"]
)
def test_pools_left_by_a_failed_load_are_released(
    entry: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    pools = {"weights": entry}

    def release() -> None:
        released.extend(["pools", *map(str, warm_base._kept)])
        pools.clear()

    instance = SimpleNamespace(release_pools=release, allocator_and_pools=pools)
    allocator(monkeypatch, instance)

    monkeypatch.setattr(warm_base, "_kept", [])

    warm_base._forget_sleep_memory()
    warm_base._forget_sleep_memory()

    assert released == ["pools", "its allocator"] * 2, "what gives memory back outlives them"


def test_kernels_of_a_warm_up_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    module("vllm.utils.jit_monitor", monkeypatch, _handle_jit_event=heard.append)
    monitor: Any = sys.modules["vllm.utils.jit_monitor"]

    with warm_base.no_kernel_warnings(), warm_base.no_kernel_warnings():
        monitor._handle_jit_event("in the warm-up")
    monitor._handle_jit_event("afterwards")

    assert heard == ["afterwards"]


def test_a_model_that_listens_twice_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like Qwen3, whose class and base class are both compiled; it removes only one of them."""
    listeners: dict[int, Any] = {}

    class Model:
        def hear(self) -> None: ...

        def cleanup(self) -> None:
            listeners.pop(2, None)

    def of_torch() -> None: ...

    model = Model()
    listeners |= {0: of_torch, 1: model.hear, 2: model.hear}
    module("torch._dynamo.convert_frame", monkeypatch, _bytecode_hooks=listeners)

    warm_base._forget_models()

    assert list(listeners) == [0]
