"""What front ends of vLLM ask, recorded from each version, and what becomes of it."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.bridge.engine_core import ADD, EngineCoreRequest, EnginePoolingParams, decode_request
from gateway.bridge.requests import Asked, Caller, Refused, RequestReader, id_of, read_id
from gateway.http.errors import GatewayError
from tokenyard.protocol.wire import PoolingParams, SamplingParams, unpack_tokens

_RECORDED = sorted((Path(__file__).parent / "bridge").glob("*.json"))
_READER = RequestReader("adder", "idem-", 100)
_EMBED = partial(EnginePoolingParams, task="embed")


def recorded(path: Path) -> dict[str, list[EngineCoreRequest]]:
    """The requests that a front end has made, by what its client asked."""
    return {
        name: [decode_request(base64.b64decode(frame)) for kind, frame in messages]
        for name, messages in json.loads(path.read_text()).items()
        if {kind for kind, _ in messages} == {ADD.hex()}
    }


@pytest.fixture(params=_RECORDED, ids=lambda path: path.stem)
def asked(request: pytest.FixtureRequest) -> dict[str, list[Asked]]:
    found = recorded(request.param)
    return {name: [_READER.read(one) for one in several] for name, several in found.items()}


def test_each_version_that_can_be_had_is_recorded() -> None:
    names = {path.stem for path in _RECORDED}
    assert names == {"vllm-0.32.0", "vllm-rs-0.31.0", "vllm-rs-0.32.0", "vllm-rs-0.33.0"}


def test_a_request_is_what_its_client_asked_for(asked: dict[str, list[Asked]]) -> None:
    (plain,) = asked["plain"]
    assert unpack_tokens(plain.request.tokens or b"") == [5, 6, 14, 7, 8, 16]
    assert plain.request.params == SamplingParams(max_tokens=3, detokenize=False)
    stated = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    assert set(plain.request.stated) == stated, "no default of the yard's replaces them"
    assert (plain.request.model, plain.request.client, plain.is_kept) == ("adder", "http", False)


def test_a_name_is_the_same_each_time(asked: dict[str, list[Asked]]) -> None:
    (stream,) = asked["stream"]
    assert stream.is_kept
    assert stream.request.id in {"cmpl-idem-one", "cmpl-idem-one-0"}
    assert stream.request.stream
    assert stream.request.result_ttl_s == 100
    assert stream.request.params.temperature == 0


def test_who_asks_comes_with_the_id(asked: dict[str, list[Asked]]) -> None:
    (chat,) = asked["chat"]
    request = chat.request
    assert (request.tenant, request.client) == ("acme", "http.acme")
    assert (chat.priority_class, request.stream_interval_ms) == ("high", 30)
    assert request.id.startswith("chatcmpl-two-")
    params = request.params
    assert (params.seed, params.top_p, params.top_k) == (7, 0.5, 3)
    assert params.min_p == pytest.approx(0.1)


def test_parameters_pass(asked: dict[str, list[Asked]]) -> None:
    params = asked["penalties"][0].request.params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert (params.repetition_penalty, params.min_tokens) == (1.5, 2)
    assert (params.logit_bias, params.stop_token_ids) == ({5: 1.0}, [7])
    assert params.ignore_eos
    assert params.stop is None, "the front end finds it"
    logprobs = asked["logprobs"][0].request
    assert (logprobs.params.logprobs, logprobs.params.prompt_logprobs) == (2, 1)
    assert not logprobs.stream, "those of the prompt come with the result"
    constraint = asked["structured"][0].request.params.structured_outputs
    assert constraint is not None
    assert constraint.regex == "[0-9]{2}"


def test_what_stands_beside_the_parameters_passes(asked: dict[str, list[Asked]]) -> None:
    request = asked["extras"][0].request
    assert (request.priority, request.cache_salt, request.session) == (7, "salty", "session")
    assert request.params.extra_args == {"a": "b"}
    assert request.params.allowed_token_ids == [5, 6, 7]


def test_several_answers_and_prompts_have_names_of_their_own() -> None:
    (path,) = (one for one in _RECORDED if one.stem == "vllm-0.32.0")
    found = recorded(path)
    names = [[_READER.read(one).request.id for one in found[name]] for name in ("several", "lists")]
    assert names == [
        ["0_cmpl-idem-several-0", "1_cmpl-idem-several-0"],
        ["cmpl-idem-lists-0", "cmpl-idem-lists-1"],
    ]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"routed_experts_prompt_start": 1}, "routed_experts_prompt_start"),
        ({"extra_args": {"kv_transfer_params": {"host": "x"}}}, "kv_transfer_params"),
        ({"_bad_words_token_ids": [[5]]}, "bad_words"),
        ({"something_new": 1}, "something_new"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_what_the_wire_has_not_is_refused_by_name(params: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        _READER.read(EngineCoreRequest("r", [5], None, params, None, 0.0))


@pytest.mark.parametrize(
    "asked",
    [
        EngineCoreRequest("r", [5], None, None, EnginePoolingParams(task="plugin"), 0.0),
        EngineCoreRequest("r", [5], None, None, EnginePoolingParams(task="generate"), 0.0),
        EngineCoreRequest("r", [5], None, None, EnginePoolingParams(task=None), 0.0),
        EngineCoreRequest("r", None, None, {}, None, 0.0, prompt_embeds=b"x"),
        EngineCoreRequest("r", [5], [{"image": 1}], {}, None, 0.0),
        EngineCoreRequest("r" * 201, [5], None, {}, None, 0.0),
        EngineCoreRequest("~a b~normal~~~r", [5], None, {}, None, 0.0),
        EngineCoreRequest("~~best~~~r", [5], None, {}, None, 0.0),
    ],
)
def test_what_is_no_task_on_text_is_refused(asked: EngineCoreRequest) -> None:
    with pytest.raises(Refused):
        _READER.read(asked)


def test_a_task_that_pools_passes() -> None:
    params = _EMBED(dimensions=8, use_activation=False, skip_reading_prefix_cache=True)
    asked = EngineCoreRequest("embd-r-0", [5, 6, 7], None, None, params, 0.0, priority=3)
    request = _READER.read(asked).request
    assert (request.task, request.inputs) == ("embed", [[5, 6, 7]])
    assert request.pooling == PoolingParams(
        dimensions=8, use_activation=False, skip_reading_prefix_cache=True
    )
    assert (request.priority, request.stream) == (3, False)
    cut = {"max_tokens_per_doc": 2, "compressed_token_type_ids": 1}
    asked.pooling_params = _EMBED(extra_kwargs=cut)
    assert _READER.read(asked).request.inputs == [[[5], [6, 7]]]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"late_interaction_params": ["cache_query"]}, "late_interaction_params"),
        ({"late_chunking_params": [64]}, "late_chunking_params"),
        ({"extra_kwargs": {"something_new": 1}}, "something_new"),
    ],
)
def test_of_a_task_that_pools_too_it_is_refused_by_name(params: dict[str, Any], why: str) -> None:
    with pytest.raises(GatewayError, match=f"{why}: not carried"):
        _READER.read(EngineCoreRequest("r", [5], None, None, _EMBED(**params), 0.0))


def test_an_id_says_who_asks_wherever_it_stands() -> None:
    caller = Caller("acme", "low", 100, 1_795_000_000_000)
    given = id_of(caller, "idem-k")
    assert read_id(f"cmpl-{given}-0-abcd") == (caller, "cmpl-idem-k-0-abcd")
    assert read_id(id_of(Caller(), "k")) == (Caller(), "k")
    assert read_id("cmpl-k-0") == (Caller(), "cmpl-k-0")
