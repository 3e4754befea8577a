"""Parsing of input lines: the requests that they describe, or their faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batch.conftest import completion
from tokenyard.batch.lines import BadLine, HttpLine, ParsedLine, parse_line, read_http_line
from tokenyard.batch.requests import line_request, output_for
from tokenyard.batch.state import BatchSpec
from tokenyard.client.build import PreparedRequest, RequestBuilder
from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.replies import ErrorInfo, Result
from tokenyard.protocol.wire import ChatOptions, Request

CHAT = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def parse(line: dict[str, Any]) -> ParsedLine | BadLine:
    return parse_line(7, json.dumps(line).encode())


def line(line: dict[str, Any]) -> ParsedLine:
    found = parse(line)
    assert isinstance(found, ParsedLine), found
    return found


def test_a_completion_asks_for_its_prompt_and_parameters() -> None:
    found = line(completion(1, model="m", temperature=0, stop=["x"], logit_bias={"5": -1}))
    assert (found.custom_id, found.form, found.prompt) == ("line-1", "completion", "prompt 1")
    assert found.options == {"model": "m"}
    assert found.params == {
        "max_tokens": 4,
        "temperature": 0,
        "stop": ["x"],
        "logit_bias": {5: -1},
    }


def test_a_chat_without_a_bound_is_not_cut_short() -> None:
    assert line({**CHAT, "body": {"messages": HELLO}}).params == {"max_tokens": None}
    short = {"messages": HELLO, "max_completion_tokens": 3, "max_tokens": None}
    assert line({**CHAT, "body": short}).params == {"max_tokens": 3}


CHAT_OPTIONS: dict[str, Any] = {
    "tools": TOOLS,
    "documents": [{"title": "t", "text": "x"}],
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
}


def drafted(line: dict[str, Any]) -> Request:
    """The request drafted from a line."""
    asked = line_request(BatchSpec(input="", output=""), 1, json.dumps(line).encode(), "1")
    [draft] = RequestBuilder("me", None).prepare_many([asked.item], {})
    assert isinstance(draft, PreparedRequest), draft
    return draft.request


def test_the_body_of_a_chat_becomes_the_same_request() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
        {"role": "assistant", "content": "so"},
    ]
    body = {"messages": messages, "tool_choice": "none", **CHAT_OPTIONS}
    openai = drafted({**CHAT, "body": body})
    plain = drafted({"id": "c", "messages": messages, **CHAT_OPTIONS})
    assert openai.messages == plain.messages == messages
    assert openai.chat == plain.chat == ChatOptions(**CHAT_OPTIONS)


def test_a_cache_salt_is_carried() -> None:
    body = {"messages": HELLO, "cache_salt": "mine"}
    assert drafted({**CHAT, "body": body}).cache_salt == "mine"
    assert drafted({"id": "c", "prompt": "x", "cache_salt": "mine"}).cache_salt == "mine"
    bad = parse_line(1, json.dumps({**CHAT, "body": body | {"cache_salt": [1]}}).encode())
    assert isinstance(bad, BadLine)
    assert "cache_salt" in bad.message


def test_an_effort_goes_to_the_chat_template_as_in_vllm() -> None:
    body = {"messages": HELLO, "reasoning_effort": "none"}
    kwargs = {"reasoning_effort": "none", "enable_thinking": False}
    assert drafted({**CHAT, "body": body}).chat.chat_template_kwargs == kwargs
    body |= {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    kwargs = {"reasoning_effort": "low", "enable_thinking": False}
    assert drafted({**CHAT, "body": body}).chat.chat_template_kwargs == kwargs


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_one(prompt: Any, asked: Any) -> None:
    assert line(completion(1, prompt=prompt)).prompt == asked


@pytest.mark.parametrize(
    ("asked", "params"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"schema": {"a": 1}}}, {"json": {"a": 1}}),
    ],
)
def test_a_response_format_becomes_structured_outputs(asked: Any, params: Any) -> None:
    found = line(completion(1, response_format=asked))
    assert found.params.get("structured_outputs") == params


def test_chat_logprobs_are_a_switch_and_a_number() -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    assert line({**CHAT, "body": body}).params["logprobs"] == 2
    assert line(completion(1, logprobs=3)).params["logprobs"] == 3


def test_fields_without_effect_on_the_answer_are_left_out() -> None:
    found = line(completion(1, user="u", store=True, metadata={"a": "b"}, n=None))
    assert found.params == {"max_tokens": 4}


def test_a_plain_line_has_parameters_inside_or_beside() -> None:
    found = line({"id": 5, "prompt": "p", "params": {"seed": 1}, "max_tokens": 2, "model": "m"})
    assert (found.custom_id, found.prompt, found.options) == ("5", "p", {"model": "m"})
    assert found.params == {"seed": 1, "max_tokens": 2}


def test_a_plain_line_without_id_gets_its_line_number() -> None:
    assert line({"tokens": [1, 2]}).custom_id == "7"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({**completion(1), "custom_id": None}, "custom_id"),
        ({**completion(1), "method": "GET"}, "method: must be POST"),
        ({**completion(1), "url": "/v1/embeddings"}, "url: must be"),
        ({**completion(1), "body": []}, "body: must be an object"),
        ({**completion(1), "more": 1}, "no such field: more"),
        (completion(1, stream=True), "body.stream: is not supported"),
        (completion(1, prompt=["a", "b"]), "one prompt per line"),
        (completion(1, prompt=[1, "b"]), "token ids"),
        (completion(1, prompt={"a": 1}), "token ids"),
        (completion(1, model=5), "body.model"),
        (completion(1, logit_bias={"x": 1}), "logit_bias"),
        (completion(1, response_format="json"), "response_format"),
        ({**CHAT, "body": {"messages": "hello"}}, "messages: must be a list"),
        ({**CHAT, "body": {"messages": HELLO, "tools": TOOLS}}, "body.tool_choice"),
        (
            {**CHAT, "body": {"messages": HELLO, "tools": TOOLS, "tool_choice": "auto"}},
            "body.tool_choice",
        ),
        ({**CHAT, "body": {"messages": HELLO, "tool_choice": "required"}}, "body.tool_choice"),
        ({**CHAT, "body": {"messages": HELLO, "chat_template": "x"}}, "body.chat_template"),
        (
            {
                **CHAT,
                "body": {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": 5},
            },
            "body.chat_template_kwargs",
        ),
        ({**CHAT, "body": {"messages": HELLO, "logprobs": 3}}, "body.logprobs"),
        ({"id": "a"}, "give one of"),
        ({"id": "a", "prompt": "p", "tokens": [1]}, "give one of"),
        ({"id": "a", "prompt": "p", "topp": 1}, "no such field: topp"),
        ({"id": "a", "prompt": [1]}, "must be a string"),
        ({"id": [], "prompt": "p"}, "id: must be"),
        ({"id": "a", "prompt": "p", "params": 3}, "params"),
        ({"id": "a", "prompt": "p", "model": 3}, "model"),
    ],
)
def test_a_bad_line_reports_its_fault(line: dict[str, Any], fault: str) -> None:
    found = parse(line)
    assert isinstance(found, BadLine)
    assert fault in found.message


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'"a"', b"1", None, b"[" * 100_000])
def test_line_that_is_not_an_object_is_bad(raw: bytes | None) -> None:
    assert isinstance(parse_line(1, raw), BadLine)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "prompt", "messages", "model", "max_tokens", "stop", "logprobs", "top_logprobs", "n",
        "response_format", "logit_bias", "tools", "seed", "params", "tokens", "metadata", "session",
        "structured_outputs", "stream", "id", "custom_id", "tenant", "documents", "tool_choice",
        "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
        "reasoning_effort",
    ]
)  # fmt: skip
BODIES = st.dictionaries(NAMES, ANY_JSON, max_size=5)


@given(BODIES, st.sampled_from(["/v1/completions", "/v1/chat/completions", None]))
def test_arbitrary_bytes_are_at_most_a_bad_line(body: dict[str, Any], url: str | None) -> None:
    line = body if url is None else {"custom_id": "c", "method": "POST", "url": url, "body": body}
    asked = line_request(BatchSpec(input="", output=""), 1, json.dumps(line).encode(), "1")
    # If the line is drafted as by `Client.map`, I expect a draft or a refusal, and no other error.
    [draft] = RequestBuilder("fuzz", None).prepare_many([asked.item], {"priority_class": "low"})
    assert isinstance(draft, PreparedRequest | InvalidRequest)
    if isinstance(asked.line, BadLine):
        assert isinstance(draft, InvalidRequest)
    error = ErrorInfo(Code.INVALID_REQUEST, "no")
    line_out = output_for("batch_0", asked, Result(id="1", status="failed", tokens=[], error=error))
    assert line_out.error is not None


def test_a_job_of_one_endpoint_refuses_all_other_lines() -> None:
    other = {**CHAT, "url": "/v1/completions", "body": {"prompt": "x"}}
    chat = {**CHAT, "body": {"messages": HELLO}}
    raws = [json.dumps(each).encode() for each in (chat, other, {"id": "p", "prompt": "x"})]
    read = [read_http_line(1, raw, "/v1/chat/completions") for raw in raws]
    assert read[0] == HttpLine("c", {"messages": HELLO})
    assert [isinstance(each, BadLine) for each in read] == [False, True, True]
