"""vLLM's sampling parameters on their way to a worker: each accepted one arrives as it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.http.context import CURRENT, RequestContext
from gateway.http.errors import GatewayError
from tests.support.builders import entry_fields
from tests.unit.gateway.conftest import vllm_params
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.sampling import REFUSED, TAKEN
from tokenyard.protocol.wire import Request, SamplingParams, request_fields

#: A value other than the default for each accepted parameter.
VALUES: dict[str, Any] = {
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "temperature": 0.7,
    "watermarking": True,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "max_tokens": 99,
    "min_tokens": 4,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "prompt_logprob_token_ids": [[1, 2]],
    "prompt_logprob_start": 1,
    "logprob_token_ids": [3, 4],
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "logit_bias": {5: 1.5},
    "allowed_token_ids": [4, 5, 6],
    "extra_args": {"x": [1]},
    "bad_words": ["no"],
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 12,
    "trace_decode_token_ids": [4, 5],
}
#: Accepted parameters with a form of their own.
OWN_FORM = {"structured_outputs", "repetition_detection", "flat_logprobs", "stream_interval"}
#: What must stand beside a parameter, by vLLM's rules.
BESIDE: dict[str, dict[str, Any]] = {
    "prompt_logprob_start": {"prompt_logprob_token_ids": [[1, 2]]},
    "detokenize": {},
}


def wired(params: Any, *, detokenize: bool = True) -> SamplingParams:
    """Parameters of vLLM's as those of the wire."""
    from gateway.frontend.params import wire_params

    return wire_params(params, detokenize=detokenize)


def on_the_wire(**given: Any) -> dict[str, Any]:
    """The parameters that a worker gets, by name."""
    params = wired(vllm_params(**given), detokenize=given.get("detokenize", True))
    parsed = parse_request(entry_fields(Request(id="q", tokens=b"\1\0\0\0", params=params)))
    assert isinstance(parsed, Request), parsed
    return {name: getattr(parsed.params, name) for name in TAKEN}


def test_every_accepted_parameter_is_tried() -> None:
    assert VALUES.keys() | OWN_FORM == TAKEN.keys()


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_parameter_arrives_as_it_was(name: str) -> None:
    given = BESIDE.get(name, {}) | {name: VALUES[name]}

    found, usual = on_the_wire(**given), on_the_wire()

    assert found[name] == VALUES[name]
    # And nothing else changes, but for what vLLM itself derives.
    others = {other for other in TAKEN if found[other] != usual[other]}
    assert others <= given.keys() | DERIVED.get(name, set())


#: What vLLM changes beside a parameter.
DERIVED = {
    "prompt_logprobs": {"skip_reading_prefix_cache"},
    "prompt_logprob_token_ids": {"skip_reading_prefix_cache"},
    "prompt_logprob_start": {"skip_reading_prefix_cache"},
    "trace_decode_token_ids": {"ignore_eos", "max_tokens", "min_tokens"},
}


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "object"}},
        {"json": '{"type": "object"}'},
        {"regex": "[0-9]+"},
        {"choice": ["a", "b"]},
        {"grammar": "root ::= 'a'"},
        {"json_object": True},
        {"regex": "a", "disable_any_whitespace": True},
        {"json_object": True, "whitespace_pattern": " "},
    ],
)
def test_a_constraint_arrives_as_it_was(constraint: dict[str, Any]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    found = on_the_wire(structured_outputs=StructuredOutputsParams(**constraint))

    given = found["structured_outputs"]
    assert {name: getattr(given, name) for name in constraint} == constraint


def test_a_detection_of_repetitions_arrives_as_it_was() -> None:
    from vllm.sampling_params import RepetitionDetectionParams

    given = {"max_pattern_size": 9, "min_pattern_size": 2, "min_count": 3}
    found = on_the_wire(repetition_detection=RepetitionDetectionParams(**given))

    made = found["repetition_detection"]
    assert {name: getattr(made, name) for name in given} == given


def test_defaults_stay_off_the_wire() -> None:
    request = Request(id="q", prompt="x", params=wired(vllm_params()))

    assert request_fields(request)["params"] == (b'{"detokenize":true}')


def of_older_vllm(*missing: str, **defaults: Any) -> Any:
    """The parameters of a request that gives none, of a vLLM with other ones."""
    params = vllm_params()
    named = [name for name in params.__struct_fields__ if name not in missing]
    values = {name: getattr(params, name) for name in named} | defaults
    fields = [
        (name, Any, msgspec.field(default_factory=partial(values.get, name)))
        for name in named
        if name not in defaults
    ]
    return msgspec.defstruct(
        "SamplingParams", [*fields, *((k, Any, v) for k, v in defaults.items())]
    )()


def test_an_older_vllm_has_fewer_parameters() -> None:
    new = {"watermarking", "prompt_logprob_token_ids", "prompt_logprob_start"}
    params = of_older_vllm(*new)
    assert wired(params) == wired(vllm_params())


def test_what_a_vllm_does_by_itself_is_not_asked_for() -> None:
    params = of_older_vllm(watermarking=True)  # as in 0.30 and 0.31
    assert wired(params).watermarking is None
    params.watermarking = False
    assert wired(params).watermarking is False


def test_every_refused_parameter_is_internal_or_refused_here() -> None:
    assert set(REFUSED) - {"routed_experts_prompt_start"} == {
        "output_kind",
        "skip_clone",
        "output_text_buffer_length",
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"routed_experts_prompt_start": 3}, "routed_experts_prompt_start"),
        ({"n": 65}, "n"),
        # No worker connects to a host that a request names.
        ({"extra_args": {"kv_transfer_params": {"remote_host": "x"}}}, "kv_transfer_params"),
    ],
)
def test_what_the_wire_does_not_carry_is_refused_by_name(given: dict[str, Any], name: str) -> None:
    with pytest.raises(GatewayError) as refused:
        on_the_wire(**given)
    assert (refused.value.status, refused.value.param) == (400, name)


def test_a_large_constraint_is_a_fault_of_its_field() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from gateway.frontend.params import check_constraint

    params = vllm_params(structured_outputs=StructuredOutputsParams(regex="a" * 100))
    check_constraint(vllm_params(), 10)
    check_constraint(params, 200)
    with pytest.raises(GatewayError, match="at most 100 are taken") as refused:
        check_constraint(params, 100)
    assert (refused.value.status, refused.value.param) == (400, "structured_outputs")


@pytest.mark.parametrize("name", ["structured_outputs", "response_format", "text", "tools[1]"])
def test_a_large_constraint_of_a_body_is_a_fault_of_its_field(name: str) -> None:
    from gateway.frontend.params import check_asked

    large = {"schema": {"enum": ["a" * 100]}}
    body = {name: {"format": large} if name == "text" else large}
    body |= {"tools": [{}, large]} if name == "tools[1]" else {}
    check_asked(body, 100)  # no request that generates
    before = CURRENT.set(RequestContext(durable_id="a" * 32, client="me", created=1.0))
    try:
        check_asked(body, 200)
        check_asked({"text": "a" * 200, "structured_outputs": None}, 100)
        with pytest.raises(GatewayError, match="at most 100 are taken") as refused:
            check_asked(body, 100)
    finally:
        CURRENT.reset(before)
    assert (refused.value.status, refused.value.param) == (400, name)
