"""Other weights in place of a model's own: the engine answers with them, and forgets the old."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.harness import MODELS, Outcome, answers, ask, drain, greedy, run, spec_of
from tests.engines.llama import write_llama
from worker.engines import Backend, Engine, TokenDelta, Unsupported
from worker.models import AdapterSpec

SUBTRACTOR = str(MODELS / "subtractor")
SUMS = [(75, 48), (27, 48), (99, 1), (10, 10)]


def texts(engine: Engine, sign: str, **fields: Any) -> list[str]:
    """Its answers to some sums."""
    asked = [
        ask(f"{at}-0", prompt=f"{left}{sign}{right}=", temperature=0.0, **fields)
        for at, (left, right) in enumerate(SUMS)
    ]
    return [str(outcome.choice.text) for outcome in run(engine, *asked)]


def adds(engine: Engine, **fields: Any) -> bool:
    return texts(engine, "+", **fields) == [str(left + right) for left, right in SUMS]


def subtracts(engine: Engine, **fields: Any) -> bool:
    return texts(engine, "-", **fields) == [str(left - right) for left, right in SUMS]


# ---------------------------------------------------------------------------------- every engine


def test_other_weights_change_the_answers_until_the_own_ones_are_back(engine: Engine) -> None:
    before = answers(engine)

    engine.reload(SUBTRACTOR)
    between, said = answers(engine), engine.info.weights
    engine.reload("")

    assert all(one != other for one, other in zip(before, between, strict=True))
    assert answers(engine) == before
    assert (said, engine.info.weights) == (SUBTRACTOR, "")


@pytest.mark.parametrize("seed", [None, 7])
def test_a_stream_continues_after_its_tokens_with_other_weights(
    engine: Engine, seed: int | None
) -> None:
    # Given a stream that has published a few tokens
    engine.add(greedy("1-0", stream=True, seed=seed))
    shown = [
        token
        for _ in range(4)
        for event in engine.step()
        if isinstance(event, TokenDelta)
        for token in event.tokens
    ]

    # If its weights change
    outcome = Outcome()
    engine.reload(SUBTRACTOR)
    drain(engine, {"1-0": outcome})
    (behind,) = run(engine, greedy("2-0", published=shown, stream=True, seed=seed))
    engine.reload("")

    # I expect no token twice or missing, and the rest to come from the new weights.
    assert 0 < len(shown) < 12
    assert outcome.tokens == behind.tokens
    assert outcome.tokens[: len(shown)] == shown
    streamed = outcome.streamed()
    assert outcome.tokens[len(shown) :][: len(streamed)] == streamed
    assert len(outcome.tokens) == 12


# ------------------------------------------------------------------------------------------- vLLM


@pytest.mark.vllm
def test_the_adder_subtracts_and_adds_again(vllm_engine: Engine) -> None:
    assert adds(vllm_engine)

    vllm_engine.reload(SUBTRACTOR)
    assert subtracts(vllm_engine)
    vllm_engine.sleep(2)
    vllm_engine.wake()
    assert subtracts(vllm_engine), "the weights come back from where they came"

    vllm_engine.reload("")
    assert adds(vllm_engine)


@pytest.mark.vllm
def test_an_engine_starts_with_other_weights(backend: Backend, tmp_path: Path) -> None:
    # Given a checkpoint with weights and nothing else
    shutil.copy(MODELS / "subtractor" / "model.safetensors", tmp_path)

    engine = backend.load(spec_of("adder"), weights=str(tmp_path))

    assert subtracts(engine)
    assert engine.info.weights == str(tmp_path)
    engine.reload("")
    assert adds(engine)
    engine.close()


def truncated(folder: Path) -> Path:
    """A checkpoint whose header promises more bytes than the file has."""
    whole = (MODELS / "subtractor" / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


def empty(folder: Path) -> Path:
    return folder


def larger(folder: Path) -> Path:
    return write_llama(folder / "large")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (truncated, "model.safetensors|SafetensorError|incomplete"),
        (empty, "no weights"),
        (larger, "does not fit"),
    ],
)
def test_unreadable_weights_leave_the_previous_ones(
    vllm_engine: Engine, tmp_path: Path, make: Callable[[Path], Path], said: str
) -> None:
    vllm_engine.reload(SUBTRACTOR)

    with pytest.raises(Unsupported, match=said):
        vllm_engine.reload(str(make(tmp_path)))

    assert vllm_engine.info.weights == SUBTRACTOR
    assert subtracts(vllm_engine)
    vllm_engine.reload("")
    assert adds(vllm_engine)


@pytest.mark.vllm
def test_weights_that_do_not_fit_are_refused_at_the_load(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no folder"):
        backend.load(spec_of("adder"), weights=str(tmp_path / "nowhere"))

    engine = backend.load(spec_of("adder"))
    assert adds(engine)
    engine.close()


@pytest.mark.vllm
def test_adapters_stay_with_the_new_weights(backend: Backend) -> None:
    adapter = AdapterSpec("adder-subtracts", str(MODELS / "adder-subtracts"))
    engine = backend.load(spec_of("adder", adapters=(adapter,)))
    asked = greedy(prompt="75-48=", tokens=None, model="adder-subtracts")
    assert subtracts(engine, model="adder-subtracts")

    engine.reload(SUBTRACTOR)
    assert subtracts(engine)
    with_adapter = run(engine, asked)[0].tokens  # the adapter was made for other weights: nonsense
    engine.reload("")

    assert adds(engine)
    assert subtracts(engine, model="adder-subtracts")
    assert run(engine, asked)[0].tokens != with_adapter
    engine.close()
