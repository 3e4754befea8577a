"""tokenyard.protocol.parse: anything may stand in an entry, and nothing makes the reader raise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenyard.protocol.chat import MAX_CHAT_DEPTH
from tokenyard.protocol.errors import Code
from tokenyard.protocol.parse import parse_assignment, parse_request, unfold
from tokenyard.protocol.wire import (
    MAX_FIELDS,
    Assignment,
    ChatOptions,
    Refused,
    Request,
    SamplingParams,
    Unanswerable,
    pack_tokens,
)

GOOD = {b"id": b"q1", b"prompt": b"Hello"}
ASSIGNED = {**GOOD, b"sid": b"normal/1-0", b"attempt": b"2", b"crashes": b"1"}


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
    assert isinstance(found, Refused)
    assert (found.id, found.code) == ("q1", Code.INVALID_REQUEST)
    return found.message


PROMPTS = {"tokens", "prompt", "messages"}


def test_least_that_a_client_must_say() -> None:
    assert parse_request(GOOD) == Request(id="q1", prompt="Hello")


def test_everything_that_a_client_can_say() -> None:
    fields = GOOD | {
        b"client": b"ann",
        b"model": b"adder",
        b"params": b'{"max_tokens":5,"temperature":0,"stop":["\\n"],"logit_bias":{"5":-1}}',
        b"stream": b"1",
        b"reply_to": b"replies:ann",
        b"priority": b"-3",
        b"deadline": b"1795000000000",
        b"result_ttl": b"60",
        b"tenant": b"t",
        b"session": b"s",
        b"metadata": b'{"traceparent":"00-0-0-00"}',
        b"cache_salt": b"mine",
        b"reasoning_ended": b"0",
        b"reasoning_parser_kwargs": b'{"chat_template_kwargs":{"thinking":true}}',
        b"v": b"1",
    }

    assert parse_request(fields) == Request(
        id="q1",
        client="ann",
        prompt="Hello",
        model="adder",
        params=SamplingParams(max_tokens=5, temperature=0.0, stop=["\n"], logit_bias={5: -1.0}),
        stream=True,
        reply_to="replies:ann",
        priority=-3,
        deadline_ms=1795000000000,
        result_ttl_s=60,
        tenant="t",
        session="s",
        metadata={"traceparent": "00-0-0-00"},
        cache_salt="mine",
        reasoning_ended=False,
        reasoning_parser_kwargs={"chat_template_kwargs": {"thinking": True}},
    )


def test_everything_that_a_client_can_say_of_a_chat() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}, "and kind"]},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "it is"},
    ]
    fields = {
        b"id": b"q1",
        b"messages": json(messages),
        b"tools": json(tools),
        b"documents": b'[{"title":"t","text":"x"}]',
        b"chat_template_kwargs": b'{"enable_thinking":false}',
        b"add_generation_prompt": b"0",
        b"continue_final_message": b"1",
    }

    assert parse_request(fields) == Request(
        id="q1",
        messages=messages,
        chat=ChatOptions(
            tools=tools,
            documents=[{"title": "t", "text": "x"}],
            chat_template_kwargs={"enable_thinking": False},
            add_generation_prompt=False,
            continue_final_message=True,
        ),
    )


@pytest.mark.parametrize("name", ["messages", "tools", "documents"])
def test_nesting_up_to_the_bound_is_taken(name: str) -> None:
    value = json([{"role": "user", "content": "x", "more": deep(MAX_CHAT_DEPTH - 3)}])
    given = {b"id": b"q1", b"messages": HELLO, name.encode(): value}

    assert isinstance(parse_request(given), Request)


@pytest.mark.parametrize("raw", [b"[1, 0, 2147483647]", pack_tokens([1, 0, 2**31 - 1])])
def test_tokens_come_packed_or_as_json(raw: bytes) -> None:
    found = parse_request({b"id": b"q1", b"tokens": raw})

    assert found == Request(id="q1", tokens=pack_tokens([1, 0, 2**31 - 1]))


def test_packed_tokens_that_begin_like_json_are_packed_tokens() -> None:
    raw = b"[\0\0\0]\0\0\0"

    assert parse_request({b"id": b"q1", b"tokens": raw}) == Request(id="q1", tokens=raw)


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

    assert isinstance(found, Unanswerable)
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
            "messages[0].content[1]: is of type image_url, and models here take text only",
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

    assert isinstance(found, Refused)
    assert found.message == "prompt: give exactly one of tokens, prompt, messages, not none"


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

    assert isinstance(found, Refused)
    assert (found.client, found.reply_to, found.kind) == ("ann", "replies:ann", "frame")


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


@given(st.dictionaries(FIELD_NAMES, VALUES, max_size=12))
def test_nothing_but_the_named_fields_spoils_a_good_entry(fields: dict[bytes, bytes]) -> None:
    found = parse_request(GOOD | fields | {b"id": b"q1", b"client": b"ann"})

    assert isinstance(found, Request | Refused)
    assert (found.id, found.client) == ("q1", "ann")


def test_assignment_is_a_request_with_its_fencing_token() -> None:
    found = parse_assignment("5-0", ASSIGNED | {b"published": b"\1\0\0\0"})

    assert found == Assignment(
        request=Request(id="q1", prompt="Hello"),
        entry="5-0",
        sid="normal/1-0",
        attempt=2,
        crashes=1,
        published=b"\1\0\0\0",
    )


@pytest.mark.parametrize(
    ("said", "epoch"),
    [(b"0", 0), (b"1" * 19, int("1" * 19)), (b"", None), (b"-1", None), (b"9" * 5000, None)],
)
def test_epoch_that_makes_no_sense_is_none(said: bytes, epoch: int | None) -> None:
    found = parse_assignment("5-0", ASSIGNED | {b"epoch": said})

    assert found is not None
    assert found.first_epoch == epoch


@pytest.mark.parametrize(
    "fields",
    [
        {},
        GOOD,
        {b"attempt": b"1"},
        ASSIGNED | {b"id": b"\xff"},
        ASSIGNED | {b"sid": b"\xff"},
        ASSIGNED | {b"sid": b"normal/soon"},
        ASSIGNED | {b"attempt": b"first"},
        ASSIGNED | {b"attempt": b"-1"},
        ASSIGNED | {b"attempt": b"9" * 5000},
        ASSIGNED | {b"crashes": b"none"},
        ASSIGNED | {b"published": b"\0\0\0"},
    ],
)
def test_lane_entry_that_is_no_assignment(fields: dict[bytes, bytes]) -> None:
    assert parse_assignment("5-0", fields) is None


def test_assignment_that_this_version_cannot_read_says_so() -> None:
    found = parse_assignment("5-0", ASSIGNED | {b"params": b'{"flavour":1}'})

    assert found is not None
    assert found.fault == "params.flavour: there is no such parameter"
    assert (found.request.id, found.attempt) == ("q1", 2)


@given(st.dictionaries(FIELD_NAMES | st.binary(max_size=10), VALUES, max_size=12))
def test_nothing_on_a_lane_makes_its_reader_raise(fields: dict[bytes, bytes]) -> None:
    found = parse_assignment("5-0", fields)

    assert found is None or isinstance(found, Assignment)


DEFAULTS = {"temperature": 0, "max_tokens": 64, "stop": ["\n"], "logit_bias": {"5": -1.0}}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, SamplingParams(temperature=0, max_tokens=64, stop=["\n"], logit_bias={5: -1.0})),
        (b"{}", SamplingParams(temperature=0, max_tokens=64, stop=["\n"], logit_bias={5: -1.0})),
        (
            b'{"temperature":0.5,"logit_bias":{"6":1}}',
            SamplingParams(temperature=0.5, max_tokens=64, stop=["\n"], logit_bias={6: 1.0}),
        ),
        (
            b'{"max_tokens":null,"stop":null,"logit_bias":null}',
            SamplingParams(temperature=0, max_tokens=None),
        ),
        # What the wire takes for a request that says nothing, said by the request.
        (
            b'{"max_tokens":16,"temperature":1,"stop":[],"logit_bias":{}}',
            SamplingParams(max_tokens=16, temperature=1, stop=[], logit_bias={}),
        ),
    ],
)
def test_a_model_says_what_a_request_leaves_out(
    said: bytes | None, expected: SamplingParams
) -> None:
    fields = ASSIGNED if said is None else ASSIGNED | {b"params": said}

    found = parse_assignment("5-0", fields, DEFAULTS)

    assert found is not None
    assert (found.fault, found.request.params) == ("", expected)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"{", "params: is not the JSON expected"),
        (b"[]", "params: Expected `object`, got `array`"),
        (b'{"flavour":1}', "params.flavour: there is no such parameter"),
        (b'{"top_p":0}', "params.top_p: Expected `float` > 0.0"),
        (b'{"stop":"\\ud800"}', "params: is not the JSON expected"),
        (b'{"\\ud800":1}', "params: is not the JSON expected"),
        (b'{"stop":' + b"[" * 100_000, "params: is not the JSON expected"),
        (b'{"min_tokens":65}', "params.min_tokens: must not exceed max_tokens"),
    ],
)
def test_invalid_params_are_refused_beside_defaults_too(said: bytes, error: str) -> None:
    found = parse_assignment("5-0", ASSIGNED | {b"params": said}, DEFAULTS)

    assert found is not None
    assert found.fault.startswith(error)


def test_defaults_are_no_further_field() -> None:
    """A request of as many fields as may be, and none of them ``params``, stays good."""
    most = {f"x{i}".encode(): b"" for i in range(MAX_FIELDS - len(GOOD))}

    found = parse_assignment("5-0", ASSIGNED | most, DEFAULTS)

    assert found is not None
    assert found.fault == ""


@given(st.dictionaries(FIELD_NAMES | st.binary(max_size=10), VALUES, max_size=12))
def test_nothing_on_a_lane_makes_its_reader_raise_beside_defaults(
    fields: dict[bytes, bytes],
) -> None:
    found = parse_assignment("5-0", fields, DEFAULTS)

    assert found is None or isinstance(found, Assignment)


@given(VALUES)
def test_defaults_refuse_nothing_that_would_be_good_without_them(params: bytes) -> None:
    fields = ASSIGNED | {b"params": params}
    plain = parse_assignment("5-0", fields)
    found = parse_assignment("5-0", fields, {"temperature": 0.0, "top_k": 1})

    assert plain is not None
    assert found is not None
    assert bool(found.fault) == bool(plain.fault)


COMMON = b'{"v":"1","client":"ann","reply_to":"replies:ann","params":"{\\"max_tokens\\":3}"}'
FOLDED = {b"id": b"q1", b"tokens": pack_tokens([1, 2]), b"common": COMMON}


@pytest.mark.parametrize("prompt", [{b"tokens": pack_tokens([1, 2])}, {b"prompt": b"x"}])
def test_common_fields_may_be_in_the_field_common(prompt: dict[bytes, bytes]) -> None:
    fields = {b"id": b"q1", **prompt}
    plain = {b"v": b"1", b"client": b"ann", b"reply_to": b"replies:ann"}
    plain[b"params"] = b'{"max_tokens":3}'

    assert parse_request(fields | {b"common": COMMON}) == parse_request(fields | plain)


@pytest.mark.parametrize("prompt", [{b"tokens": pack_tokens([1, 2])}, {b"prompt": b"x"}])
def test_common_is_parsed_once(prompt: dict[bytes, bytes]) -> None:
    found = [parse_request({b"id": name, **prompt, b"common": COMMON}) for name in (b"a", b"b")]

    first, second = (one for one in found if isinstance(one, Request))
    assert first.params is second.params


@pytest.mark.parametrize("prompt", [b"", b"\xff"])
def test_a_bad_text_is_refused_where_the_rest_is_shared(prompt: bytes) -> None:
    found = parse_request({b"id": b"q1", b"prompt": prompt, b"common": COMMON})

    assert isinstance(found, Refused)
    assert found.message.startswith("prompt")


def test_an_entry_has_the_last_word_on_what_it_shares() -> None:
    found = parse_request({**FOLDED, b"params": b'{"max_tokens":4}'})

    assert isinstance(found, Request)
    assert (found.client, found.params.max_tokens) == ("ann", 4)


def test_system_fields_in_common_are_ignored() -> None:
    spoofed = b'{"sid":"high/1-1","attempt":"7","published":"abcd","model":"m"}'

    found = unfold({b"id": b"q1", b"common": spoofed, b"attempt": b"1"})

    assert found == {b"id": b"q1", b"model": b"m", b"attempt": b"1"}


@pytest.mark.parametrize(
    "common",
    [b"", b"{", b"[]", b"null", b'{"n":1}', b"\xff", b'{"client":"no spaces"}', b'{"client":""}'],
)
def test_an_entry_with_unreadable_common_is_unanswerable(common: bytes) -> None:
    """The client may stand there, so that there is nobody to answer."""
    assert isinstance(parse_request({**FOLDED, b"common": common}), Unanswerable)


@pytest.mark.parametrize("reply_to", ["", "replies:ann", "replies:bob"])
def test_a_client_field_beside_an_unreadable_common_gets_a_refusal(
    reply_to: str,
) -> None:
    own = {b"id": b"q1", b"client": b"ann", b"reply_to": reply_to.encode()}

    found = parse_request({**own, b"prompt": b"x", b"common": b"{"})

    assert isinstance(found, Refused)
    assert (found.id, found.client, found.code) == ("q1", "ann", Code.INVALID_REQUEST)
    assert found.reply_to == (reply_to if reply_to == "replies:ann" else "")
    assert found.message.startswith("common: ")


@pytest.mark.parametrize("own", [{b"id": b""}, {b"client": b"no spaces"}])
def test_an_entry_with_unreadable_common_and_client_is_unanswerable(
    own: dict[bytes, bytes],
) -> None:
    fields = {b"id": b"q1", b"client": b"ann", b"prompt": b"x", b"common": b"{"}
    assert isinstance(parse_request(fields | own), Unanswerable)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({b"tokens": b""}, "tokens"),
        ({b"tokens": b"abc"}, "tokens"),
        ({b"tokens": pack_tokens([-1])}, "tokens"),
        ({b"prompt": b"x"}, "prompt"),
        ({b"tokens": b"", b"prompt": b"x"}, "prompt"),
        ({b"common": b'{"prompt":"x"}'}, "prompt"),
        ({b"common": b'{"params":"{\\"top_p\\":2}"}'}, "params.top_p"),
    ],
)
def test_an_error_in_common_is_reported_like_one_in_an_own_field(
    fields: dict[bytes, bytes], field: str
) -> None:
    found = parse_request(FOLDED | fields)

    assert isinstance(found, Refused)
    assert found.message.startswith(field)


def test_defaults_of_a_model_fill_what_is_shared() -> None:
    found = parse_request(FOLDED, {"temperature": 0.5})

    assert isinstance(found, Request)
    assert (found.params.max_tokens, found.params.temperature) == (3, 0.5)


def test_common_in_common_is_ignored() -> None:
    nested = b'{"common":"{\\"model\\":\\"m\\"}","tenant":"t"}'

    assert unfold({b"id": b"q1", b"common": nested}) == {b"id": b"q1", b"tenant": b"t"}
