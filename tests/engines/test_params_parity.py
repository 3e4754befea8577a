"""The wire's sampling parameters are vLLM's: same names, same defaults, no wider bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from tokenyard.errors import InvalidRequest
from tokenyard.parse import parse_request
from tokenyard.wire import Refused, SamplingParams, StructuredOutputs
from worker.engines.vllm_environment import engine_environment, set_environment

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    set_environment(engine_environment(cpu=True))


def test_every_parameter_is_one_of_vllms_with_its_default() -> None:
    import vllm

    theirs = {field.name: field.default for field in msgspec.structs.fields(vllm.SamplingParams)}
    ours = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    ours.pop("detokenize")  # unset: it depends on whether the prompt was text

    assert ours == {name: theirs[name] for name in ours}


def test_every_constraint_is_one_of_vllms_with_its_default() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    theirs = {field.name: field.default for field in dataclasses.fields(StructuredOutputsParams)}
    ours = {field.name: field.default for field in msgspec.structs.fields(StructuredOutputs)}

    assert ours == {name: theirs[name] for name in ours}


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"n": 0},
    {"n": -1},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"temperature": -0.1},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"max_tokens": 0},
    {"min_tokens": -1},
    {"min_tokens": 17},
    {"stop": [""]},
    {"bad_words": [""]},
    {"logprobs": -2},
    {"prompt_logprobs": -2},
]


@pytest.mark.parametrize("params", OUT_OF_RANGE, ids=str)
def test_what_vllm_finds_out_of_range_is_refused_by_name(params: dict[str, Any]) -> None:
    import vllm

    name = next(iter(params))
    with pytest.raises(Exception, match=name):
        vllm.SamplingParams(**params)

    assert _refused_field(params) == f"params.{name}"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_k": -1},
        {"top_p": 1.0},
        {"min_p": 1.0},
        {"presence_penalty": -2.0},
        {"seed": -(2**63)},
        {"max_tokens": None},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"stop": "a"},
        {"stop": ["a", "b"]},
        {"n": 64},
    ],
    ids=str,
)
def test_the_edges_of_the_range_are_let_in_by_both(params: dict[str, Any]) -> None:
    from worker.engines.vllm_params import build_params

    assert _refused_field(params) is None
    build_params(SamplingParams(**params), streams=False, detokenize=True)


def _refused_field(params: dict[str, Any]) -> str | None:
    """The field that is named where a request with these parameters is refused.

    By the parser, which is what the coordinator has; else by the door of vLLM, as the worker has.
    """
    from worker.engines.vllm_params import build_params

    parsed = parse_request({b"id": b"a", b"prompt": b"b", b"params": msgspec.json.encode(params)})
    if isinstance(parsed, Refused):
        return parsed.message.partition(":")[0]
    try:
        build_params(parsed.params, streams=False, detokenize=True)
    except InvalidRequest as refused:
        return refused.field
    return None
