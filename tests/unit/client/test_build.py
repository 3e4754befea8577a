"""Requests as a user writes them, and as they travel."""

from __future__ import annotations

import datetime
import itertools
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_clock import FakeClock
from tokenyard.client import checks
from tokenyard.client.build import RequestBuilder
from tokenyard.client.options import SamplingOptions
from tokenyard.client.tokenization import Detokenizer, LocalText, Tokenizer, load_tokenizer
from tokenyard.protocol.errors import InvalidRequest, SettingsError
from tokenyard.protocol.wire import (
    SamplingParams,
    prompt_value,
    request_fields,
    template_of,
    unpack_tokens,
)

MODELS = Path(__file__).parents[3] / "examples" / "arithmetic" / "models"


CHAT: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CHAT_OPTIONS: dict[str, Any] = {
    "tools": TOOLS,
    "documents": [{"title": "t", "text": "x"}],
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
}


class Bytes:
    """A tokenizer: one token for each byte, 256 is special."""

    def encode(self, texts: Any) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Any, *, skip_special_tokens: bool) -> str:
        special = b"" if skip_special_tokens else b"<s>"
        parts = (special if token == 256 else bytes([token]) for token in tokens)
        return b"".join(parts).decode(errors="replace")


@pytest.fixture
def builder() -> RequestBuilder:
    return RequestBuilder("me", None)


def wire_size(prepared: Any) -> int:
    """Bytes of the entry that `submit` writes."""
    template, prompt = template_of(prepared.request), prompt_value(prepared.request)
    fields = {"id": prepared.request.id, template.field: prompt, "common": template.common}
    return sum(
        len(name) + len(value if isinstance(value, bytes) else value.encode())
        for name, value in fields.items()
    )


def test_sampling_options_are_those_of_the_wire() -> None:
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert set(SamplingOptions.__annotations__) == names


@pytest.mark.parametrize("tokenizer", [None, Bytes()])
@pytest.mark.parametrize(
    ("prompt", "more"),
    [
        ("Grüße", {}),
        ([1, 2, 3], {}),
        (array("i", [1, 2]), {}),
        ([{"role": "user", "content": "ß"}], {}),
        (CHAT, CHAT_OPTIONS),
    ],
)
def test_the_size_is_what_the_coordinator_counts(
    tokenizer: Tokenizer, prompt: Any, more: dict[str, Any]
) -> None:
    builder = RequestBuilder("me", tokenizer)
    said: list[dict[str, Any]] = [{}, {"id": "ß"}, {"stop": ["ß"], "detokenize": True}]
    said += [{"max_tokens": 3, "metadata": {"x": '"ß"'}, "stream": True}]
    for options in said:
        prepared = builder.prepare(prompt, options | more)
        assert prepared.size == wire_size(prepared)
        assert prepared.template == template_of(prepared.request)


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ([CHAT[0], "x"], {}, "messages[1]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0]"),
        ([{"role": "user", "content": object()}], {}, "messages"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages"),
        (CHAT, {"tools": {"a": 1}}, "tools"),
        (CHAT, {"tools": [object()]}, "tools"),
        (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        (CHAT, {"add_generation_prompt": 0}, "add_generation_prompt"),
        ("text", {"tools": TOOLS}, "tools"),
    ],
)
def test_a_chat_that_cannot_be_is_refused_at_the_client(
    messages: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        RequestBuilder("me", None).prepare(messages, options)
    assert refused.value.field == error


def test_default_options_of_a_chat_may_be_said_of_a_text() -> None:
    prepared = RequestBuilder("me", None).prepare("x", {"add_generation_prompt": True})
    assert prepared.request.prompt == "x"


def test_the_largest_request_passes_and_one_byte_more_does_not(builder: RequestBuilder) -> None:
    builder.max_request_bytes = builder.prepare("xxxx", {"id": "q"}).size
    builder.prepare("xxxx", {"id": "q"})
    with pytest.raises(InvalidRequest, match="bytes"):
        builder.prepare("xxxxx", {"id": "q"})


@pytest.mark.parametrize("alike", [True, 1.0])
def test_options_of_another_type_are_read_again(builder: RequestBuilder, alike: Any) -> None:
    builder.prepare([1], {"seed": 1})

    with pytest.raises(InvalidRequest, match="seed"):
        builder.prepare([1], {"seed": alike})
    with pytest.raises(InvalidRequest, match="seed"):
        builder.prepare_many([[1]], {"seed": alike})


def test_options_of_concurrent_threads_are_not_mixed_up(
    builder: RequestBuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a thread that looks whether the options are those that are known,
    builder.prepare([1], {"model": "a"})
    compare = checks.are_same

    def interrupted(known: Any, given: Any) -> bool:
        monkeypatch.undo()
        same = compare(known, given)
        builder.prepare([1], {"model": "b"})
        return same

    # if another has options of its own read meanwhile, I expect each to have its own.
    monkeypatch.setattr(checks, "are_same", interrupted)
    assert builder.prepare([1], {"model": "a"}).request.model == "a"


def test_ids_of_our_making_differ() -> None:
    builders = [RequestBuilder("me", None), RequestBuilder("me", None)]
    ids = {builder.prepare("x", {}).request.id for builder in builders for _ in range(100)}
    assert len(ids) == 200


def test_options_of_an_item_override_shared_options(builder: RequestBuilder) -> None:
    item: Any = {"prompt": [1], "temperature": 0.5, "model": "b"}
    [own, shared] = builder.prepare_many([item, [2]], {"temperature": 0.1, "model": "a"})
    assert not isinstance(own, InvalidRequest)
    assert not isinstance(shared, InvalidRequest)
    assert (own.request.model, own.request.params.temperature) == ("b", 0.5)
    assert (shared.request.model, shared.request.params.temperature) == ("a", 0.1)


def test_params_are_a_base_for_what_stands_beside_them() -> None:
    options = {"params": SamplingParams(top_k=5, temperature=0.5), "temperature": 0}
    params = RequestBuilder("me", None).prepare("x", options).request.params
    assert params == SamplingParams(top_k=5, temperature=0)


@pytest.mark.parametrize("tokenizer", [None, Bytes()])
@pytest.mark.parametrize("where", ["beside", "base", "object"])
def test_given_parameters_are_sent_even_with_default_values(tokenizer: Any, where: str) -> None:
    """Else a model's own defaults would take the place of what the user asked for."""
    said = {"max_tokens": 16, "temperature": 1.0, "top_k": 0, "stop": None, "ignore_eos": False}
    more: dict[str, Any] = {"params": SamplingParams(seed=7)} if where == "object" else {}
    options = {"params": said} if where == "base" else said | more

    prepared = RequestBuilder("me", tokenizer).prepare("x", options)

    params = request_fields(prepared.request)["params"]
    assert isinstance(params, bytes)
    sent = msgspec.json.decode(params)
    assert said.items() <= sent.items()
    assert "top_p" not in sent
    assert prepared.size == wire_size(prepared)


def test_parameters_that_are_not_given_are_not_sent() -> None:
    assert "params" not in request_fields(RequestBuilder("me", None).prepare("x", {}).request)


def test_none_leaves_an_option_out() -> None:
    options = {"id": None, "model": None, "deadline_s": None, "max_tokens": None}
    request = RequestBuilder("me", None).prepare("x", options).request
    assert (request.model, request.deadline_ms, request.params.max_tokens) == ("", None, None)


def test_a_deadline_is_by_the_servers_clock(builder: RequestBuilder, fake_clock: FakeClock) -> None:
    builder.broker_time.measured((5_000, 250_000), fake_clock.monotonic())
    fake_clock.step(3600.0)
    fake_clock.advance(1.0)
    assert builder.prepare("x", {"deadline_s": 60}).request.deadline_ms == 5_061_250
    with pytest.raises(InvalidRequest, match="time zone"):
        builder.prepare("x", {"deadline": datetime.datetime(2100, 1, 1)})  # noqa: DTZ001 - the point


@pytest.mark.parametrize("left_s", ["5", 0, -1, 1e308, -1e308, 10**400, float("inf"), float("nan")])
def test_a_deadline_that_is_no_time_is_refused(builder: RequestBuilder, left_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="seconds from now"):
        builder.prepare("x", {"deadline_s": left_s})


def test_who_makes_the_text() -> None:
    builder = RequestBuilder("me", Bytes())
    cases: list[tuple[Any, dict[str, Any], bool, bool]] = [
        ("x", {}, True, False),
        ("x", {"stop": "y"}, False, True),
        ("x", {"detokenize": False}, False, False),
        ([1], {}, False, False),
        ([1], {"detokenize": True}, True, False),
        ([{"role": "user", "content": "x"}], {}, False, True),
    ]
    for prompt, options, here, there in cases:
        prepared = builder.prepare(prompt, options)
        assert (prepared.request.tokens is None) == (prepared.request.messages is not None)
        assert (prepared.local_text is not None, prepared.request.wants_text) == (here, there), (
            options
        )


@given(st.text(max_size=20), st.text(max_size=20), st.data())
def test_text_by_pieces_is_the_text(prompt: str, text: str, data: st.DataObject) -> None:
    tokens = list(text.encode())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    local = LocalText(Bytes(), tuple(prompt.encode()[-5:]))
    detokenizer = Detokenizer(local)
    edges = [0, *cuts, len(tokens)]
    pieces = [detokenizer.add(tokens[start:end]) for start, end in itertools.pairwise(edges)]
    whole = local.whole(tokens)
    assert whole == text
    assert whole.startswith("".join(pieces))
    if not text.endswith("\ufffd"):
        assert whole == "".join(pieces)


def test_special_tokens_are_shown_where_asked() -> None:
    assert LocalText(Bytes()).whole([65, 256]) == "A"
    assert LocalText(Bytes(), skip_special_tokens=False).whole([65, 256]) == "A<s>"


def test_a_tokenizer_of_hugging_face() -> None:
    tokenizer = load_tokenizer(str(MODELS / "adder"))
    [ids] = tokenizer.encode(["27+48="])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "27+48="
    prepared = RequestBuilder("me", tokenizer).prepare("27+48=", {})
    assert unpack_tokens(prepared.request.tokens or b"") == list(ids)


def test_a_tokenizer_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match="no-such-folder"):
        load_tokenizer("./no-such-folder")
