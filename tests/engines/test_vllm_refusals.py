"""Hostile requests are refused or served, and do not harm vLLM."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from tests.engines.harness import Outcome, ask, core_of, greedy, refused_field, run
from tests.support.vllm_versions import installed_vllm
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import Assignment, RepetitionDetection, StructuredOutputs
from worker.engines import Engine, Finished, RequestError
from worker.engines.vllm.engine import VllmEngine
from worker.engines.vllm.grammars import GrammarLimits

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
    "constraint",
    [
        StructuredOutputs(json={"$ref": "#"}),
        StructuredOutputs(grammar="root ::= root"),
        StructuredOutputs(grammar='root ::= "語"'),
        StructuredOutputs(regex="1語"),
        StructuredOutputs(choice=["a"]),
    ],
    ids=lambda constraint: str(msgspec.to_builtins(constraint)),
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_constraint_that_nothing_meets_is_no_fault_to_try_again(
    vllm_engine: Engine, constraint: StructuredOutputs, stream: bool
) -> None:
    unmet, neighbour = run(
        vllm_engine, ask("1-0", structured_outputs=constraint, stream=stream), greedy("2-0")
    )

    assert unmet.fault
    assert unmet.fault.code == "INVALID_REQUEST"
    assert unmet.fault.message.startswith("params.structured_outputs: ")
    assert len(neighbour.tokens) == 12


def test_a_grammar_that_takes_forever_holds_nobody_up(
    vllm_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a compilation that does not end
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    forever, compiled = threading.Event(), XgrammarBackend.compile_grammar

    def compile_grammar(self: Any, kind: Any, grammar: str, *rest: Any, **named: Any) -> Any:
        if grammar == "7+":
            forever.wait()
        return compiled(self, kind, grammar, *rest, **named)

    monkeypatch.setattr(XgrammarBackend, "compile_grammar", compile_grammar)
    try:
        vllm_engine.add(ask("1-0", structured_outputs=StructuredOutputs(regex="7+")))

        # I expect others to be served meanwhile, and its request to be refused
        outcomes: dict[str, Outcome] = {}
        vllm_engine.add(ask("2-0", structured_outputs=StructuredOutputs(regex="[1-3]{4}=")))
        while not (outcomes.get("2-0") and outcomes["2-0"].finished):
            for event in vllm_engine.step():
                if isinstance(event, Finished):
                    outcomes.setdefault(event.key, Outcome()).finished = event
        core = core_of(vllm_engine)
        monkeypatch.setattr(core._grammars, "_limits", GrammarLimits(timeout_s=0.0))
        (refused,) = vllm_engine.step()
        assert isinstance(refused, RequestError)
        assert (refused.key, refused.code) == ("1-0", "INVALID_REQUEST")
        assert not vllm_engine.has_unfinished
    finally:
        forever.set()


@pytest.mark.parametrize(
    ("field", "params"),
    [
        # vLLM's, which this engine does not support
        ("params.logprob_token_ids", {"logprob_token_ids": [8]}),
        ("params.logprob_token_ids", {"logprob_token_ids": [10**9]}),
        ("params.prompt_logprob_token_ids", {"prompt_logprob_token_ids": [[8]]}),
        ("params.prompt_logprob_start", {"prompt_logprob_start": 1}),
        ("params.thinking_token_budget", {"thinking_token_budget": 3}),
        ("params.trace_decode_token_ids", {"trace_decode_token_ids": [8]}),
        ("params.trace_decode_token_ids", {"trace_decode_token_ids": [10**9]}),
        ("params.extra_args", {"extra_args": {"a": 2**70}}),
        ("params.repetition_detection", {"repetition_detection": RepetitionDetection(1, 2, 3)}),
        # values that vLLM refuses
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
def test_parameters_that_cannot_be_served_are_refused_by_name(
    vllm_engine: Engine, field: str, params: dict[str, Any]
) -> None:
    assert refused_field(vllm_engine, ask(**params)) == field


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
