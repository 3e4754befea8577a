"""tokenyard.protocol.parse: anything may stand in an entry, and nothing makes the reader raise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenyard.protocol.chat import MAX_CHAT_DEPTH
from tokenyard.protocol.errors import Code
from tokenyard.protocol.parse import BadJson, ForeignJson, parse_owner, parse_request
from tokenyard.protocol.wire import (
    MAX_FIELDS,
    Refused,
    Request,
    SamplingParams,
    Unanswerable,
    pack_tokens,
)

GOOD = {b"id": b"q1", b"prompt": b"Hello"}
HELLO = b'[{"role":"user","content":"hello"}]'
json = msgspec.json.encode


def said(message: dict[str, Any]) -> bytes:
    """Messages of one user's."""
    return json([{"role": "user", **message}])


def called(tool_calls: Any) -> bytes:
    """Messages of one assistant's that calls tools."""
    return json([{"role": "assistant", "content": None, "tool_calls": tool_calls}])


def deep(levels: int) -> list[Any]:
    """So many arrays, and an object, inside each other."""
    value: list[Any] = [{}]
    for _ in range(levels - 1):
        value = [value]
    return value


def deep_text(levels: int) -> str:
    """JSON of so many objects inside each other."""
    return '{"a":' * levels + "1" + "}" * levels


def refusal(**fields: bytes) -> str:
    """Why an entry that would be good but for ``fields`` is refused."""
    given_as = {b"id": b"q1", **({} if fields.keys() & PROMPTS else {b"prompt": b"Hello"})}
    found = parse_request(given_as | {name.encode(): value for name, value in fields.items()})
    assert (found.id, found.code) == ("q1", Code.INVALID_REQUEST)
    return found.message


PROMPTS = {"tokens", "prompt", "messages"}


@pytest.mark.parametrize("name", ["messages", "tools", "documents"])
def test_nesting_up_to_the_bound_is_taken(name: str) -> None:
    value = json([{"role": "user", "content": "x", "more": deep(MAX_CHAT_DEPTH - 3)}])
    given = {b"id": b"q1", b"messages": HELLO, name.encode(): value}

    assert isinstance(parse_request(given), Request)


@pytest.mark.parametrize(
    ("raw", "packed"),
    [
        (b"[1, 0, 2147483647]", pack_tokens([1, 0, 2**31 - 1])),
        (pack_tokens([1, 0, 2**31 - 1]), pack_tokens([1, 0, 2**31 - 1])),
        (b"[\0\0\0]\0\0\0", b"[\0\0\0]\0\0\0"),  # begins like JSON
    ],
)
def test_tokens_come_packed_or_as_json(raw: bytes, packed: bytes) -> None:
    assert parse_request({b"id": b"q1", b"tokens": raw}) == Request(id="q1", tokens=packed)


def test_fields_of_a_later_version_are_skipped() -> None:
    assert parse_request(GOOD | {b"flavour": b"\xff"}) == Request(id="q1", prompt="Hello")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"prompt": b"x"},
        {b"id": b""},
        {b"id": b"x" * 201},
        {b"id": b"\xff\xfe"},
        {b"id": b"q1", b"client": b""},
        {b"id": b"q1", b"client": b"no spaces"},
        {b"id": b"q1", b"client": b"a/b"},
        {b"id": b"q1", b"client": b"ann\n"},
        {b"id": b"q1", b"client": b"x" * 101},
        {b"id": b"q1", b"client": b"\xff"},
        {b"id": b"q1", b"client": "é".encode()},
    ],
)
def test_entry_that_names_nobody_to_answer(fields: dict[bytes, bytes]) -> None:
    found = parse_request(fields)

    assert found.reason.startswith(("id: ", "client: "))


def test_longest_id_is_counted_in_bytes() -> None:
    assert isinstance(parse_request(GOOD | {b"id": "é".encode() * 100}), Request)
    assert isinstance(parse_request(GOOD | {b"id": "é".encode() * 101}), Unanswerable)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": b""}, "prompt: is empty"),
        ({"prompt": b"\xff"}, "prompt: is not UTF-8 at byte 0"),
        ({"prompt": b"x", "tokens": b"[1]"}, "prompt: give exactly one of"),
        ({"tokens": b""}, "tokens: is empty"),
        ({"tokens": b"[]"}, "tokens: is empty"),
        ({"tokens": b"[1,"}, "tokens: packed ids are int32"),
        ({"tokens": b"[1,]"}, "tokens: is not the JSON expected"),
        ({"tokens": b"[-1]"}, "tokens[0]: Expected `int` >= 0"),
        ({"tokens": b"[1,2147483648]"}, "tokens[1]: Expected `int` <= 2147483647"),
        ({"tokens": b'["1"]'}, "tokens[0]: Expected `int`, got `str`"),
        ({"tokens": b"[1.5]"}, "tokens[0]: Expected `int`, got `float`"),
        ({"tokens": pack_tokens([1, -1])}, "tokens: token ids must not be negative"),
        ({"tokens": b"\1\0\0"}, "tokens: packed ids are int32"),
        ({"messages": b"[]"}, "messages: is empty"),
        ({"messages": b"{}"}, "messages: Expected `array`, got `object`"),
        ({"messages": b"[1]"}, "messages[0]: Expected `object`, got `int`"),
        ({"messages": b'[{"content":"x"}]'}, "messages[0].role: must be a string"),
        ({"messages": b'[{"role":1}]'}, "messages[0].role: must be a string"),
        ({"messages": said({})}, "messages[0].content: is missing; a message of role user"),
        ({"messages": said({"content": None})}, "messages[0].content: is missing"),
        ({"messages": said({"content": 5})}, "messages[0].content: must be a string or an array"),
        ({"messages": said({"content": [5]})}, "messages[0].content[0]: must be a string or an"),
        ({"messages": said({"content": [{}]})}, "messages[0].content[0].type: use one of text"),
        (
            {"messages": said({"content": ["x", {"type": "image_url", "image_url": {}}]})},
            "messages[0].content[1].image_url.url: give the content itself as a base64 data: URL",
        ),
        (
            {"messages": said({"content": [{"type": "text", "text": "x", "input_audio": {}}]})},
            "messages[0].content[0]: is of type input_audio",
        ),
        ({"messages": said({"content": [{"type": "smell"}]})}, "messages[0].content[0].type: use"),
        (
            {"messages": said({"content": [{"type": "text", "text": None}]})},
            "messages[0].content[0].text: must be a string",
        ),
        ({"messages": called(5)}, "messages[0].tool_calls: must be an array"),
        ({"messages": called(["f"])}, "messages[0].tool_calls[0]: must be an object"),
        ({"messages": called([{"type": "custom", "function": {}}])}, "messages[0].tool_calls[0]:"),
        ({"messages": called([{"function": {}}])}, "messages[0].tool_calls[0].function.name"),
        (
            {"messages": called([{"function": {"name": "f", "arguments": "{"}}])},
            "messages[0].tool_calls[0].function.arguments: must be a JSON object: Expecting",
        ),
        (
            {"messages": called([{"function": {"name": "f", "arguments": '{"a":"\\ud800"}'}}])},
            "messages[0].tool_calls[0].function.arguments: must be a JSON object: 'utf-8' codec",
        ),
        (
            {"messages": called([{"function": {"name": "f", "arguments": "[1]"}}])},
            "messages[0].tool_calls[0].function.arguments: must be a JSON object",
        ),
        ({"messages": said({"content": "x", "more": deep(62)})}, "messages: is nested more than"),
        (
            {"messages": called([{"function": {"name": "f", "arguments": deep_text(65)}}])},
            "messages[0].tool_calls[0].function.arguments: is nested more than 64 deep",
        ),
        ({"messages": HELLO, "tools": b"{}"}, "tools: Expected `array`, got `object`"),
        ({"messages": HELLO, "tools": b'["f"]'}, "tools[0]: Expected `object`, got `str`"),
        (
            {"messages": HELLO, "tools": json([{"a": deep(62)}])},
            "tools: is nested more than 64 deep",
        ),
        ({"messages": HELLO, "documents": b"5"}, "documents: Expected `array`, got `int`"),
        ({"messages": HELLO, "chat_template_kwargs": b"[]"}, "chat_template_kwargs: Expected"),
        (
            {"messages": HELLO, "chat_template_kwargs": json({"a": deep(63)})},
            "chat_template_kwargs: is nested more than 64 deep",
        ),
        (
            {"messages": HELLO, "chat_template_kwargs": b'{"chat_template":"{{ 1 }}"}'},
            "chat_template_kwargs.chat_template: this name is reserved",
        ),
        ({"messages": HELLO, "add_generation_prompt": b"no"}, "add_generation_prompt: must be 0"),
        (
            {"messages": HELLO, "continue_final_message": b"1"},
            "continue_final_message: needs add_generation_prompt to be false",
        ),
        ({"tools": b"[]"}, "tools: goes with messages, not with prompt"),
        ({"tokens": b"[1]", "documents": b"[]"}, "documents: goes with messages, not with tokens"),
        ({"messages": b"["}, "messages: is not the JSON expected"),
        ({"params": b"{"}, "params: is not the JSON expected"),
        ({"params": b"[]"}, "params: Expected `object`, got `array`"),
        ({"params": b'{"flavour":1}'}, "params.flavour: there is no such parameter"),
        ({"params": b'{"temperature":-1}'}, "params.temperature: Expected `float` >= 0.0"),
        ({"params": b'{"temperature":1e999}'}, "params.temperature: Number out of range"),
        ({"params": b'{"temperature":NaN}'}, "params: is not the JSON expected"),
        ({"params": b'{"top_p":0}'}, "params.top_p: Expected `float` > 0.0"),
        ({"params": b'{"top_k":99999999999999999999}'}, "params.top_k: Expected `int` <="),
        ({"params": b'{"max_tokens":0}'}, "params.max_tokens: Expected `int` >= 1"),
        ({"params": b'{"max_tokens":"5"}'}, "params.max_tokens: Expected `int | null`"),
        ({"params": b'{"min_tokens":17}'}, "params.min_tokens: must not exceed max_tokens"),
        ({"params": b'{"n":65}'}, "params.n: Expected `int` <= 64"),
        ({"params": b'{"seed":9223372036854775808}'}, "params.seed: Expected `int` <="),
        ({"params": b'{"stop_token_ids":[-1]}'}, "params.stop_token_ids[0]: Expected `int` >= 0"),
        ({"params": b'{"stop":"\\ud800"}'}, "params: is not the JSON expected"),
        ({"params": b'{"logit_bias":{"x":1}}'}, "params.logit_bias: Expected `int`, got `str`"),
        ({"params": b'{"structured_outputs":{"x":1}}'}, "params.structured_outputs: Object"),
        ({"stream": b"yes"}, "stream: must be 0 or 1"),
        ({"stream": b""}, "stream: must be 0 or 1"),
        ({"reply_to": b"replies:bob"}, "reply_to: leave it out or give replies:anon"),
        *(
            ({"reply_to": b"replies:" + name}, "reply_to: leave it out or give replies:anon")
            for name in (b"bob." + b"0" * 31, b"b/b." + b"0" * 32, b"." + b"0" * 32)
        ),
        ({"stream_interval_ms": b"-1"}, "stream_interval_ms: "),
        ({"stream_interval_ms": b"60001"}, "stream_interval_ms: "),
        ({"reply_to": b"\xff"}, "reply_to: is not UTF-8"),
        ({"priority": b"soon"}, "priority: is not a whole number"),
        ({"priority": b"1.5"}, "priority: is not a whole number"),
        ({"priority": b""}, "priority: is not a whole number"),
        ({"priority": b"2147483648"}, "priority: must be from"),
        ({"priority": b"9" * 5000}, "priority: is not a whole number"),
        ({"deadline": b"-1"}, "deadline: must be from 0"),
        ({"result_ttl": b"0"}, "result_ttl: must be from 1"),
        ({"result_ttl": b"999999999"}, "result_ttl: must be from 1"),
        ({"metadata": b"[]"}, "metadata: Expected `object`, got `array`"),
        ({"metadata": b"\xff"}, "metadata: is not the JSON expected"),
        ({"model": b"\xff"}, "model: is not UTF-8"),
        ({"v": b"2"}, "v: this yard speaks version 1, not 2"),
        ({"v": b"0"}, "v: must be from 1"),
        ({"v": b"one"}, "v: is not a whole number"),
    ],
)
def test_refusal_names_the_field(fields: dict[str, bytes], message: str) -> None:
    assert refusal(**fields).startswith(message)


def test_entry_without_a_prompt() -> None:
    found = parse_request({b"id": b"q1"})

    assert found.message == "prompt: give exactly one of tokens, prompt, messages, inputs, not none"


@pytest.mark.parametrize(
    "name", ["params", "metadata", "messages", "tools", "documents", "chat_template_kwargs"]
)
@pytest.mark.parametrize("brackets", [b"[", b'{"a":', b"[{}"])
def test_json_as_deep_as_it_gets_is_refused(name: str, brackets: bytes) -> None:
    assert refusal(**{name: brackets * 100_000}).startswith(name)


def test_refused_request_is_answered_where_it_asked_to_be() -> None:
    found = parse_request(
        {b"id": b"q1", b"client": b"ann", b"reply_to": b"replies:ann", b"priority": b"x"}
    )

    assert (found.client, found.reply_to) == ("ann", "replies:ann")


def test_more_fields_than_a_lane_carries_are_refused() -> None:
    most = {f"x{i}".encode(): b"" for i in range(MAX_FIELDS - len(GOOD))}
    system = {b"sid": b"x", b"attempt": b"x", b"crashes": b"x", b"published": b"x"}

    assert isinstance(parse_request(GOOD | most), Request)
    assert isinstance(parse_request(GOOD | most | system), Request)
    assert refusal(**{f"x{i}": b"" for i in range(MAX_FIELDS)}).startswith("entry: has more than")


FIELD_NAMES = st.sampled_from(
    [name.encode() for name in Request.__struct_fields__]
    + [b"deadline", b"result_ttl", b"v", b"sid", b"attempt", b"crashes", b"published"]
)
VALUES = (
    st.binary(max_size=30)
    | st.text(max_size=30).map(str.encode)
    | st.integers().map(lambda number: str(number).encode())
    | st.sampled_from([b"1", b"x", b"[1]", b"{}", b"[]", b"null", b'[{"role":"user"}]', b"[[[["])
    | st.dictionaries(
        st.sampled_from(SamplingParams.__struct_fields__),
        st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        max_size=3,
    ).map(msgspec.json.encode)
)


@given(st.dictionaries(FIELD_NAMES | st.binary(max_size=10), VALUES, max_size=12))
@example(dict.fromkeys([b"id", b"client", b"prompt"], b"x"))
@example({b"id": b"x", b"prompt": b"x", b"params": b'{"stop":"\\ud800\\ud800"}'})
def test_nothing_in_an_entry_makes_the_reader_raise(fields: dict[bytes, bytes]) -> None:
    assert isinstance(parse_request(fields), Request | Refused | Unanswerable)


COMMONS = st.dictionaries(st.sampled_from(["id", "client", "model", "prompt", "v"]), st.text())


@given(
    st.dictionaries(FIELD_NAMES, VALUES, max_size=8),
    st.none() | VALUES | COMMONS.map(msgspec.json.encode),
)
@example(GOOD, b"{}")
@example(GOOD | {b"client": b"ann"}, b"[")
@example({b"prompt": b"x"}, b'{"id":"q","client":"ann"}')
def test_owner_is_that_of_the_request(fields: dict[bytes, bytes], common: bytes | None) -> None:
    if common is not None:
        fields = fields | {b"common": common}
    found = parse_request(fields)
    is_known = isinstance(found, Request | Refused)
    assert parse_owner(fields) == ((found.client, found.id) if is_known else None)


@given(st.dictionaries(FIELD_NAMES, VALUES, max_size=12))
def test_nothing_but_the_named_fields_spoils_a_good_entry(fields: dict[bytes, bytes]) -> None:
    found = parse_request(GOOD | fields | {b"id": b"q1", b"client": b"ann"})

    assert isinstance(found, Request | Refused)
    assert (found.id, found.client) == ("q1", "ann")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b'{"a":"\xff"}',
        b"1",
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000,
        b'{"a":NaN}',
        b'{"a":"\\ud800"}',
        b'{"a":1e999}',
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_bad_json_is_named(raw: bytes) -> None:
    with pytest.raises(BadJson, match=r"."):
        ForeignJson[dict[str, Any]](dict[str, Any]).decode(raw)


def test_good_json_is_read() -> None:
    assert ForeignJson[dict[str, int]](dict[str, int]).decode('{"a":1}') == {"a": 1}
