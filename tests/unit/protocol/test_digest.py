"""Which requests are the same, and that clients and coordinator agree on it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import entry_fields
from tokenyard.client.build import PreparedRequest, RequestBuilder
from tokenyard.protocol.digest import UNREADABLE, entry_digest, entry_recipe, request_digest
from tokenyard.protocol.parse import read_request
from tokenyard.protocol.wire import Request, prompt_value, template_of

#: What decides the answer, and so is in the digest.
DEFINING = {
    *("tokens", "prompt", "messages", "inputs", "chat", "model", "params", "stated"),
    *("task", "pooling", "query", "media"),
    *("reasoning_ended", "reasoning_parser_kwargs"),
}
#: What may differ when an id comes again: who asks, how the answer is brought, and how soon.
INCIDENTAL = {
    "id",
    "client",
    "stream",
    "stream_interval_ms",
    "reply_to",
    "priority",
    "deadline_ms",
    "result_ttl_s",
    "tenant",
    "session",
    "metadata",
    "cache_salt",
}

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "model": TEXTS,
        "temperature": st.floats(0, 2) | st.just(1),
        "max_tokens": st.integers(1, 100) | st.none(),
        "seed": st.none() | st.integers(0, 5),
        "stop": st.lists(TEXTS, max_size=2),
        "logit_bias": st.dictionaries(st.integers(0, 200), st.floats(-1, 1), max_size=4),
        "structured_outputs": st.fixed_dictionaries({"json": st.dictionaries(TEXTS, TEXTS)}),
        "detokenize": st.booleans(),
        "stream": st.booleans(),
        "metadata": st.dictionaries(TEXTS, TEXTS, max_size=1),
    },
)
PROMPTS = (
    TEXTS
    | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)
    | st.lists(
        st.fixed_dictionaries({"role": TEXTS, "content": TEXTS, "n": st.floats(0, 1)}),
        min_size=1,
        max_size=2,
    )
)
CHATS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        "documents": st.just([{"title": "t", "text": "x"}]),
        "chat_template_kwargs": st.fixed_dictionaries({"enable_thinking": st.booleans()}),
        "add_generation_prompt": st.booleans(),
    },
)


class Numbers:
    """A tokenizer, for drafts whose text becomes tokens at the client."""

    def encode(self, texts: Any) -> list[list[int]]:
        return [[len(text)] for text in texts]

    def decode(self, tokens: Any, *, skip_special_tokens: bool) -> str:
        return "x" * len(tokens)


def test_each_field_of_a_request_is_either_defining_or_not() -> None:
    """A new field of `Request` fails here until it is in one of the two."""
    assert set(Request.__struct_fields__) == DEFINING | INCIDENTAL
    assert not DEFINING & INCIDENTAL


POOLING = st.fixed_dictionaries(
    {"task": st.sampled_from(["embed", "classify", "token_embed", "token_classify"])},
    optional={
        "model": TEXTS,
        "dimensions": st.none() | st.integers(1, 9),
        "use_activation": st.booleans(),
        "metadata": st.dictionaries(TEXTS, TEXTS, max_size=1),
    },
)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3)
INPUTS = PROMPTS | st.lists(TEXTS | IDS | st.lists(IDS, min_size=2, max_size=2), min_size=1)


@given(INPUTS, POOLING)
def test_they_agree_on_tasks_that_pool(prompt: Any, options: dict[str, Any]) -> None:
    agree(RequestBuilder("me", None).prepare(prompt, options))


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3), TEXTS)
def test_a_score_is_another_with_another_query(query: str, inputs: Any, other: str) -> None:
    draft = RequestBuilder("me", None).prepare(inputs, {"task": "score", "query": query})
    agree(draft)
    changed = RequestBuilder("me", None).prepare(inputs, {"task": "score", "query": other})
    assert (changed.digest == draft.digest) == (query == other)
    embedded = RequestBuilder("me", None).prepare(inputs, {"task": "embed"})
    assert embedded.digest != draft.digest


@given(PROMPTS, OPTIONS, CHATS)
def test_clients_and_coordinator_agree(
    prompt: Any, options: dict[str, Any], chat: dict[str, Any]
) -> None:
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        options = {**options, **chat}
    agree(RequestBuilder("me", None).prepare(prompt, options))


def agree(draft: PreparedRequest) -> None:
    request, template = draft.request, template_of(draft.request)
    content = prompt_value(request)
    shared = {
        b"id": request.id.encode(),
        template.field.encode(): content if isinstance(content, bytes) else content.encode(),
        b"common": template.common.encode(),
    }

    assert draft.digest == request_digest(request)
    for fields in (entry_fields(request), shared):
        assert draft.digest == entry_digest(fields)
        assert draft.digest == entry_recipe(fields).digest_of(read_request(fields))


@given(TEXTS, OPTIONS)
def test_the_digest_does_not_depend_on_who_tokenizes(prompt: str, options: dict[str, Any]) -> None:
    with_tokenizer = RequestBuilder("me", Numbers()).prepare(prompt, options)

    assert with_tokenizer.request.tokens is not None
    assert with_tokenizer.digest == RequestBuilder("me", None).prepare(prompt, options).digest


PLAIN = {b"id": b"q1", b"prompt": b"Hello", b"params": b'{"max_tokens":8,"seed":1}'}


@pytest.mark.parametrize(
    "same",
    [
        {b"params": b'{"seed": 1, "max_tokens": 8}'},
        {b"stream": b"1", b"deadline": b"5", b"result_ttl": b"7", b"metadata": b'{"a":1}'},
        {b"priority": b"-3", b"tenant": b"t", b"session": b"s", b"reply_to": b"replies:anon"},
        {b"client": b"other", b"unknown": b"field", b"sid": b"fancy", b"v": b"1"},
        {b"cache_salt": b"x", b"reasoning_parser_kwargs": b"{}"},
    ],
)
def test_what_is_the_same_request(same: dict[bytes, bytes]) -> None:
    assert entry_digest({**PLAIN, **same}) == entry_digest(PLAIN)


@pytest.mark.parametrize(
    "other",
    [
        {b"prompt": b"hello"},
        {b"model": b"m"},
        {b"params": b'{"max_tokens":9,"seed":1}'},
        # A value that is said is not the model's default, which may be another.
        {b"params": b'{"max_tokens":8,"seed":1,"temperature":1.0}'},
        {b"common": b'{"model":"m"}'},
        {b"reasoning_ended": b"0"},
        {b"reasoning_parser_kwargs": b'{"chat_template_kwargs":{}}'},
        {b"common": b'{"reasoning_ended":"1"}'},
    ],
)
def test_what_is_another_request(other: dict[bytes, bytes]) -> None:
    assert entry_digest({**PLAIN, **other}) != entry_digest(PLAIN)


def test_what_is_another_chat() -> None:
    chat = {b"messages": b'[{"role":"user","content":"x"}]'}
    tool = b'[{"type":"function","function":{"name":"%b"}}]'
    others = [
        chat,
        {**chat, b"tools": tool % b"f"},
        {**chat, b"tools": tool % b"g"},
        {**chat, b"documents": b'[{"text":"x"}]'},
        {**chat, b"chat_template_kwargs": b'{"enable_thinking":false}'},
        {**chat, b"add_generation_prompt": b"0"},
    ]
    digests = {entry_digest(one) for one in others}
    assert UNREADABLE not in digests
    assert len(digests) == len(others)
    # What is said as it would be without is the same.
    assert entry_digest({**chat, b"add_generation_prompt": b"1"}) == entry_digest(chat)


@pytest.mark.parametrize("ended", [None, False, True])
@pytest.mark.parametrize("kwargs", [{}, {"chat_template_kwargs": {"b": 1, "a": [2.0]}}])
def test_both_sides_agree_on_reasoning(ended: bool | None, kwargs: dict[str, Any]) -> None:
    request = Request(
        id="q1", prompt="x", reasoning_ended=ended, reasoning_parser_kwargs=kwargs, cache_salt="s"
    )

    fields = entry_fields(request)
    assert request_digest(request) == entry_digest(fields)
    assert request_digest(request) == entry_recipe(fields).digest_of(read_request(fields))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({b"tokens": b"[1, 2]"}, {b"tokens": b"\1\0\0\0\2\0\0\0"}, True),
        ({b"common": b'{"prompt":"Hello"}'}, {b"prompt": b"Hello"}, True),
        ({b"tokens": b"abcd"}, {b"prompt": b"abcd"}, False),
    ],
)
def test_forms_of_a_prompt(
    one: dict[bytes, bytes], other: dict[bytes, bytes], is_same: bool
) -> None:
    assert (entry_digest(one) == entry_digest(other)) is is_same
    for fields in (one, other):
        valid = {b"id": b"q1", **fields}
        assert entry_recipe(valid).digest_of(read_request(valid)) == entry_digest(fields)


def test_long_parameters_are_read_as_short_ones_are() -> None:
    words = msgspec.json.encode({"bad_words": ["x" * 5000]})
    assert entry_digest({**PLAIN, b"params": words}) == entry_digest({**PLAIN, b"params": words})
    assert entry_digest({**PLAIN, b"params": words}) != entry_digest(PLAIN)


#: Deeper than any Python reads.
_DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"prompt": b"x", b"params": b"{"},
        {b"prompt": b"x", b"params": b'{"no_such": 1}'},
        {b"prompt": b"x", b"model": b"\xff"},
        {b"prompt": b"x", b"common": b"[]"},
        {b"tokens": b"abc"},
        {b"messages": b"{"},
        {b"messages": b"\xff"},
        {b"messages": _DEEP},
        {b"prompt": b"x", b"params": b'{"extra_args":' + _DEEP + b"}"},
        {b"messages": b"[]", b"tools": _DEEP},
        {b"prompt": b"x", b"reasoning_ended": b"yes"},
        {b"prompt": b"x", b"reasoning_parser_kwargs": b'{"k":' + _DEEP + b"}"},
    ],
)
def test_the_digest_of_an_unreadable_entry_equals_no_other(fields: dict[bytes, bytes]) -> None:
    assert entry_digest(fields) == UNREADABLE


@given(
    st.dictionaries(
        st.sampled_from([b"tokens", b"prompt", b"messages", b"params", b"common"]), st.binary()
    )
)
def test_it_never_raises(fields: dict[bytes, bytes]) -> None:
    assert entry_digest(fields)
