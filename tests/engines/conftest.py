"""One engine of each kind for all tests of this folder: vLLM takes half a minute to start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.engines.harness import spec_of
from tests.engines.in_process import InProcessBackend
from tests.engines.on_cpu import ON_CPU
from worker import executor
from worker.engines import Backend, Engine
from worker.engines.simulated.engine import SimulatedEngine
from worker.engines.vllm.backend import CoreBackend
from worker.engines.vllm.environment import engine_environment, set_environment


@pytest.fixture(scope="module")
def cpu_environment() -> None:
    """The environment in which vLLM is imported for a CPU, for tests without an engine."""
    set_environment(engine_environment(cpu=True))


@pytest.fixture(scope="package")
def warm_phases_s() -> dict[str, float]:
    """Seconds that each phase of the warm-up took; empty before it."""
    return {}


@pytest.fixture(scope="package")
def warm(warm_phases_s: dict[str, float]) -> Backend:
    """The warm backend of this process; only one of its engines may live at a time."""
    set_environment(engine_environment(cpu=ON_CPU))
    # One thread: OpenMP's threads spin and starve each other when tests share the cores.
    cores = [min(os.sched_getaffinity(0))] if ON_CPU else []
    backend = InProcessBackend(CoreBackend(cores=cores, groups=executor))
    warm_phases_s |= backend.warm_up()
    return backend


@pytest.fixture(scope="package")
def opened() -> Iterator[dict[str, Engine]]:
    """The engines started so far, by kind."""
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="package")
def open_engine(
    opened: dict[str, Engine], request: pytest.FixtureRequest
) -> Callable[[str], Engine]:
    """Return the engine of a kind; the first call starts it."""

    def get(kind: str) -> Engine:
        if kind not in opened:
            opened[kind] = _start(kind, request)
        return opened[kind]

    return get


@pytest.fixture
def backend(warm: Backend, opened: dict[str, Engine]) -> Backend:
    """The warm backend, without an engine."""
    if "vllm" in opened:
        opened.pop("vllm").close()
    return warm


def _start(kind: str, request: pytest.FixtureRequest) -> Engine:
    if kind == "simulated":
        return SimulatedEngine(max_model_len=64, vocab_size=1_000)
    backend: Backend = request.getfixturevalue("warm")
    return backend.load(spec_of("adder"))


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(
    request: pytest.FixtureRequest, open_engine: Callable[[str], Engine]
) -> Iterator[Engine]:
    """Each engine in turn, idle."""
    yield from _lend(open_engine(request.param))


@pytest.fixture
def vllm_engine(open_engine: Callable[[str], Engine]) -> Iterator[Engine]:
    """The vLLM engine, idle."""
    yield from _lend(open_engine("vllm"))


def _lend(engine: Engine) -> Iterator[Engine]:
    yield engine
    engine.abort([f"{number}-0" for number in range(100)])
    assert not engine.has_unfinished
