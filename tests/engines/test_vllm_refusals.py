"""Hostile requests are refused or served, and do not harm vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.engines.harness import ask, greedy, run
from tests.support.vllm_versions import installed_vllm
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import Assignment, StructuredOutputs
from worker.engines import Engine

pytestmark = pytest.mark.vllm


def refusal_of(engine: Engine, assignment: Assignment) -> str | None:
    """The field for which a request is refused; None if it is accepted."""
    try:
        engine.add(assignment)
    except InvalidRequest as refused:
        return refused.field
    return None


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutputs(),
        StructuredOutputs(regex="1", choice=["2"]),
        StructuredOutputs(choice=[]),
        StructuredOutputs(regex="[1-"),
        StructuredOutputs(json="{no json"),
        StructuredOutputs(json={"type": "nonsense"}),
        StructuredOutputs(grammar=""),
        StructuredOutputs(grammar="root ::= ("),
        StructuredOutputs(json_object=False),
        StructuredOutputs(structural_tag="{}"),
    ],
    ids=lambda constraint: str(msgspec.to_builtins(constraint)),
)
def test_an_invalid_constraint_is_refused_or_fails_alone(
    vllm_engine: Engine, constraint: StructuredOutputs
) -> None:
    refused = refusal_of(vllm_engine, ask("1-0", structured_outputs=constraint))

    (neighbour,) = run(vllm_engine, greedy("2-0"))

    assert refused in {None, "params.structured_outputs"}
    assert len(neighbour.tokens) == 12


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("params.logprobs", {"logprobs": 21}),
        ("params.prompt_logprobs", {"prompt_logprobs": 1_000_000}),
        ("params.n", {"n": 2, "temperature": 0.0}),
        pytest.param(
            "params.min_tokens",
            {"min_tokens": 100, "max_tokens": None},
            marks=pytest.mark.skipif(
                installed_vllm() < (0, 32), reason="before 0.32 vLLM lets the context end it"
            ),
        ),
        ("params.bad_words", {"bad_words": [""]}),
        ("params.stop", {"stop": "1", "detokenize": False}),
        ("params.repetition_penalty", {"repetition_penalty": float("inf")}),
        ("params.temperature", {"temperature": float("nan")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_vllm_refuses_are_refused_by_name(
    vllm_engine: Engine, field: str, params: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        vllm_engine.add(ask(**params))

    assert refused.value.field == field
    assert not vllm_engine.has_unfinished


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**40},
        {"max_tokens": 2**62},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"seed": -1},
        {"n": 64, "temperature": 0.5, "max_tokens": 2},
        {"n": 3, "seed": 2**63 - 1},
        {"logit_bias": {5: 1e300}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": dict.fromkeys(range(18), -1e308)},
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"min_p": 1.0, "top_p": 1e-300},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e308},
        {"stop": ["x" * 100_000]},
        {"stop": ["1"] * 10_000},
        {"stop_token_ids": [2] * 10_000},
        {"bad_words": ["1+" * 5_000]},
        {"bad_words": ["\u0001", "語"]},
        {"allowed_token_ids": [0] * 10_000},
        {"min_tokens": 50, "max_tokens": 58, "stop_token_ids": list(range(18))},
        {"logprobs": 18, "prompt_logprobs": 18},
    ],
    ids=lambda params: str(params)[:40],
)
@pytest.mark.parametrize("stream", [True, False])
def test_extreme_values_are_served_or_refused_and_the_engine_continues(
    vllm_engine: Engine, params: dict[str, Any], stream: bool
) -> None:
    values = {"prompt": "1+1=", "stream": stream} | params
    refused = refusal_of(vllm_engine, ask("1-0", **values))

    (neighbour,) = run(vllm_engine, greedy("2-0"))

    assert refused in {None, f"params.{next(iter(params))}"}
    assert len(neighbour.tokens) == 12


def test_texts_of_any_character_are_served(vllm_engine: Engine) -> None:
    for prompt in ("\x00", "語" * 20, "\U0001f600", "</s><s><pad>", "\r\n\t"):
        (outcome,) = run(vllm_engine, ask(prompt=prompt, max_tokens=2))

        assert outcome.tokens
