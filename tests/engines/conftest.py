"""One engine of each kind for all tests of this folder: vLLM takes half a minute to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worker.engines import Engine
from worker.models import ModelSpec
from worker.engines.simulated import SimulatedEngine
from worker.engines.vllm_environment import engine_environment, open_vllm, set_environment

ADDER = Path(__file__).parents[2] / "examples" / "arithmetic" / "models" / "adder"


def adder_spec(**fields: object) -> ModelSpec:
    """The adder, small and quick to start."""
    values = {
        "name": "adder",
        "path": str(ADDER),
        "dtype": "float32",
        "max_num_seqs": 16,
        "enforce_eager": True,
        "kv_cache_gib": 0.25,
    }
    return ModelSpec(**(values | fields))


@pytest.fixture(scope="package")
def opened() -> Iterator[dict[str, Engine]]:
    """Engines that have been started, by kind."""
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="package")
def open_engine(opened: dict[str, Engine]) -> Callable[[str], Engine]:
    """The engine of a kind, started when first asked for."""

    def get(kind: str) -> Engine:
        if kind not in opened:
            opened[kind] = _start(kind)
        return opened[kind]

    return get


def _start(kind: str) -> Engine:
    if kind == "simulated":
        return SimulatedEngine(max_model_len=64, vocab_size=1_000)
    # One thread: OpenMP's threads spin, and starve each other where tests share the cores.
    set_environment(engine_environment(cpu=True) | {"OMP_NUM_THREADS": "1"})
    return open_vllm(adder_spec())


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(
    request: pytest.FixtureRequest, open_engine: Callable[[str], Engine]
) -> Iterator[Engine]:
    """Each engine in turn, idle."""
    yield from _lend(open_engine(request.param))


@pytest.fixture
def vllm_engine(open_engine: Callable[[str], Engine]) -> Iterator[Engine]:
    """The real one, idle."""
    yield from _lend(open_engine("vllm"))


def _lend(engine: Engine) -> Iterator[Engine]:
    yield engine
    engine.abort([f"{number}-0" for number in range(100)])
    assert not engine.has_unfinished
