"""Sleep and wake: operations on an engine besides requests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.harness import MODELS, answers, core_of, counter_of_reuse, greedy, spec_of
from tests.engines.llama import write_llama
from tests.engines.on_cpu import needs_cpu
from worker.engines import Backend, Engine, Unsupported
from worker.engines.vllm.engine import VllmEngine

MIB = 1024**2
CACHE_MIB = 64
#: For a model of four layers: its packed weights, and the two tables of its vocabulary.
WEIGHTS_MIB = 42


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model large enough to show in the memory of a process."""
    return write_llama(tmp_path_factory.mktemp("models") / "large")


# ---------------------------------------------------------------------------------- every engine


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_the_same_after_a_sleep(engine: Engine, level: int) -> None:
    before = answers(engine)

    for _ in range(2):
        engine.sleep(level)
        engine.wake()

        assert answers(engine) == before


@pytest.mark.parametrize(
    ("ask", "fault", "said"),
    [
        (lambda engine: engine.add(greedy()), RuntimeError, "wake it"),
        (lambda engine: engine.sleep(2), Unsupported, "already"),
        (lambda engine: engine.reload(str(MODELS / "subtractor")), Unsupported, "wake it first"),
    ],
    ids=["a request", "another sleep", "a reload"],
)
def test_a_sleeping_engine_must_wake_first(
    engine: Engine, ask: Callable[[Engine], None], fault: type[Exception], said: str
) -> None:
    engine.sleep(1)

    with pytest.raises(fault, match=said):
        ask(engine)

    engine.wake()
    engine.wake()
    assert answers(engine)
    assert engine.info.weights == ""


def test_a_busy_engine_does_not_sleep(engine: Engine) -> None:
    engine.add(greedy(stream=True))

    with pytest.raises(RuntimeError, match="unfinished"):
        engine.sleep(1)


@pytest.mark.parametrize("level", [0, 3])
def test_other_sleep_levels_are_refused(engine: Engine, level: int) -> None:
    with pytest.raises(Unsupported, match="level"):
        engine.sleep(level)


# ------------------------------------------------------------------------------------------- vLLM


@pytest.mark.vllm
@needs_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sleep_returns_memory_to_the_host(backend: Backend, large: Path, dtype: str) -> None:
    engine = backend.load(spec_of("large", large, kv_cache_gib=CACHE_MIB / 1024, dtype=dtype))
    said = answers(engine)
    size = WEIGHTS_MIB if dtype == "float32" else WEIGHTS_MIB / 2

    def freed_mib(level: int) -> float:
        awake = backend.memory().host
        engine.sleep(level)
        asleep = backend.memory().host
        engine.wake()
        assert answers(engine) == said
        return (awake - asleep) / MIB

    light = freed_mib(1)
    refilled = answers(engine)  # takes a few pages of the cache again
    deep = freed_mib(2)
    engine.close()

    # I expect the first level to free the cache, and the second nearly all weights.
    assert light > 0.9 * CACHE_MIB
    assert deep > 0.9 * size
    assert refilled == said


@pytest.mark.vllm
def test_a_model_that_slept_is_collected_with_its_engine(backend: Backend, large: Path) -> None:
    def one_life() -> int:
        engine = backend.load(spec_of("large", large))
        answers(engine)
        engine.sleep(2)
        engine.wake()
        engine.close()
        return backend.memory().host

    first = one_life()
    later = [one_life() for _ in range(2)]

    assert min(later) - first < 5 * MIB  # what else the process does comes and goes


@pytest.mark.vllm
@needs_cpu
def test_weights_that_no_reload_restores_are_reported(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = backend.load(spec_of("adder"))
    inner = core_of(engine)._open()
    call = inner.collective_rpc

    def without_reload(method: object, *more: object) -> object:
        return None if method == "reload_weights" else call(method, *more)

    monkeypatch.setattr(inner, "collective_rpc", without_reload)

    engine.sleep(2)
    with pytest.raises(RuntimeError, match=r"no weights.*embed_tokens"):
        engine.wake()

    engine.close()


@pytest.mark.vllm
@needs_cpu
def test_an_engine_stays_awake_if_its_pages_cannot_be_returned(
    vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(Unsupported, match="Linux"):
        vllm_engine.sleep(1)

    monkeypatch.undo()
    assert answers(vllm_engine)


@pytest.mark.vllm
def test_a_sleep_and_a_reload_clear_the_prefix_cache(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an engine that has run a prompt longer than a block
    engine = backend.load(spec_of("adder", engine_args={"block_size": 32}))
    assert isinstance(engine, VllmEngine)
    reused = counter_of_reuse(engine, monkeypatch)

    found = [reused(), reused()]
    engine.sleep(1)
    engine.wake()
    found += [reused(), reused()]
    engine.reload(str(MODELS / "subtractor"))
    found.append(reused())
    engine.close()

    assert found == [0, 32, 0, 32, 0]
