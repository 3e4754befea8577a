"""How a warm process handles a load that fails, by its cause: with fakes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from worker.engines import DeviceLost, RankGroup
from worker.engines.vllm import warm_base
from worker.engines.vllm.backend import CoreBackend
from worker.models import ModelSpec

SPEC = ModelSpec(name="a", path="models/a", sleep_level=0)
DISTURBED = AssertionError("Error in memory profiling. Initial free memory 1 GiB")
LOST = RuntimeError("CUDA error: an illegal memory access was encountered")
TOO_LITTLE = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

Loads = Callable[..., list[str]]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """Makes engines fail one after the other; records the actions."""

    def prepare(*outcomes: Exception | None, cleans: Exception | None = None) -> list[str]:
        done: list[str] = []
        left = list(outcomes)

        def make(*_: Any, **__: Any) -> str:
            done.append("make")
            fault = left.pop(0)
            if fault:
                raise fault
            return "core"

        def let_go() -> None:
            done.append("let go")
            if cleans:
                raise cleans

        core = SimpleNamespace(Core=make)
        monkeypatch.setitem(sys.modules, "worker.engines.vllm.core", core)
        monkeypatch.setattr(warm_base, "let_go", let_go)
        monkeypatch.setattr(warm_base, "held_back", lambda **_: nullcontext())
        return done

    return prepare


@pytest.mark.parametrize(
    ("fault", "kind", "said", "actions"),
    [
        (ValueError("no such file"), ValueError, "no such file", ["make", "let go"]),
        (LOST, DeviceLost, r"^RuntimeError: CUDA error: an illegal memory access", ["make"]),
    ],
    ids=["a faulty model", "a CUDA error"],
)
def test_a_faulty_model_leaves_nothing_behind_and_a_cuda_error_ends_all(
    loads: Loads, fault: Exception, kind: type[Exception], said: str, actions: list[str]
) -> None:
    done = loads(fault)

    with pytest.raises(kind, match=said):
        CoreBackend().load(SPEC)

    assert done == actions


def test_a_load_disturbed_by_another_process_is_tried_once_more(loads: Loads) -> None:
    done = loads(DISTURBED, None)
    core: object = CoreBackend().load(SPEC)
    assert (core, done) == ("core", ["make", "let go", "make"])

    loads(DISTURBED, DISTURBED)
    with pytest.raises(AssertionError, match="memory profiling"):
        CoreBackend().load(SPEC)


def test_a_group_is_not_formed_twice(loads: Loads) -> None:
    done = loads(DISTURBED)
    executor = SimpleNamespace(release=lambda: done.append("release"))
    groups = Mock(executor_for=lambda _: executor)

    with pytest.raises(AssertionError, match="memory profiling"):
        CoreBackend(groups=groups).load(SPEC, RankGroup("nowhere", 0, (0, 1)))

    assert done == ["make", "release", "let go"]


def test_a_cuda_error_during_the_clean_up_counts_too(loads: Loads) -> None:
    loads(ValueError("no such file"), cleans=LOST)

    with pytest.raises(DeviceLost, match=r"^ValueError: no such file \(and then CUDA error"):
        CoreBackend().load(SPEC)


@pytest.mark.parametrize(("sleep_level", "ends"), [(0, False), (1, True)])
def test_too_little_memory_ends_a_process_only_if_the_model_can_sleep(
    loads: Loads, sleep_level: int, ends: bool
) -> None:
    loads(TOO_LITTLE)
    spec = ModelSpec(name="a", path="models/a", sleep_level=sleep_level)

    with pytest.raises(DeviceLost if ends else RuntimeError, match="CUDA out of memory"):
        CoreBackend().load(spec)


def test_too_little_memory_on_a_cpu_ends_no_process(loads: Loads) -> None:
    done = loads(TOO_LITTLE)

    with pytest.raises(RuntimeError, match="out of memory"):
        CoreBackend(cores=[0]).load(ModelSpec(name="a", path="models/a"))

    assert done == ["make", "let go"]
