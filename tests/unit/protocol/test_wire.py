"""tokenyard.protocol.wire: packed tokens, and a request as the fields of its entry and back."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import entry_fields, make_assignment, make_request
from tokenyard.protocol.keys import is_name
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import (
    MAX_ID_BYTES,
    MAX_RESULT_TTL_S,
    MAX_TOKEN_ID,
    PLAIN_CHAT,
    ChatOptions,
    Request,
    SamplingParams,
    StructuredOutputs,
    pack_tokens,
    request_fields,
    unpack_tokens,
)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_tokens_unpack_to_what_was_packed(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


def test_tokens_are_little_endian_int32() -> None:
    assert pack_tokens([1, 258, MAX_TOKEN_ID]) == b"\1\0\0\0\2\1\0\0\xff\xff\xff\x7f"


@pytest.mark.parametrize("odd", [2**31, -(2**31) - 1, 2**64, "1"])
def test_token_that_is_no_int32_cannot_be_packed(odd: Any) -> None:
    with pytest.raises((OverflowError, TypeError)):
        pack_tokens([odd])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_packed_tokens_come_in_fours(length: int) -> None:
    with pytest.raises(ValueError):
        unpack_tokens(b"\0" * length)


TEXT = st.text(max_size=20)
WORDS = st.text(min_size=1, max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
TOKENS = st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=20)
PENALTIES = st.floats(-2, 2, allow_nan=False)
SHARES = st.floats(0, 1, exclude_min=True)
COUNTS = st.integers(0, 2**31 - 1)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 64),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    temperature=st.floats(0, 1e30),
    top_p=SHARES,
    top_k=st.integers(-1, 1000),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.none() | TEXT | st.lists(TEXT, max_size=3),
    stop_token_ids=st.none() | TOKENS,
    max_tokens=st.none() | st.integers(17, 2**31 - 1),
    min_tokens=st.integers(0, 17),
    logprobs=st.none() | COUNTS,
    detokenize=st.just(msgspec.UNSET) | st.booleans(),
    structured_outputs=st.none()
    | st.builds(
        StructuredOutputs,
        json=st.none() | TEXT | st.dictionaries(TEXT, JSON, max_size=3),
        choice=st.none() | st.lists(TEXT, max_size=3),
    ),
    logit_bias=st.none() | st.dictionaries(st.integers(0, MAX_TOKEN_ID), PENALTIES, max_size=3),
    bad_words=st.none() | st.lists(TEXT, max_size=3),
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
CONTENTS = TEXT | st.lists(TEXT | TEXT.map(lambda text: {"type": "text", "text": text}), max_size=3)
MESSAGES = st.lists(
    st.tuples(OBJECTS, CONTENTS).map(lambda both: both[0] | {"role": "user", "content": both[1]}),
    min_size=1,
    max_size=3,
)
CHATS = st.builds(
    ChatOptions,
    tools=st.none() | st.lists(OBJECTS, max_size=2),
    documents=st.none() | st.lists(OBJECTS, max_size=2),
    chat_template_kwargs=OBJECTS.map(lambda given: {f"k {name}": given[name] for name in given}),
    add_generation_prompt=st.just(value=False),
    continue_final_message=st.booleans(),
)
IDS = st.text(min_size=1, max_size=MAX_ID_BYTES // 4)
NAMES = st.text(string.ascii_letters + string.digits + "_.:@-", min_size=1, max_size=100)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any sound request."""
    prompts: dict[str, st.SearchStrategy[Any]] = {
        "tokens": TOKENS.map(pack_tokens),
        "prompt": WORDS,
        "messages": MESSAGES,
    }
    given_as = draw(st.sampled_from(sorted(prompts)))
    client = draw(NAMES)
    chat = draw(CHATS | st.just(PLAIN_CHAT)) if given_as == "messages" else PLAIN_CHAT
    return Request(
        id=draw(IDS),
        client=client,
        chat=chat,
        **{given_as: draw(prompts[given_as])},
        model=draw(TEXT),
        params=draw(PARAMS),
        stream=(stream := draw(st.booleans())),
        stream_interval_ms=draw(st.none() | st.integers(0, 60_000)) if stream else None,
        reply_to=draw(st.sampled_from(["", f"replies:{client}", f"replies:g.{'0f' * 16}"])),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        deadline_ms=draw(st.none() | st.integers(1, 2**53)),
        result_ttl_s=draw(st.integers(1, MAX_RESULT_TTL_S)),
        tenant=draw(TEXT),
        session=draw(TEXT),
        metadata=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        cache_salt=draw(TEXT),
        reasoning_ended=draw(st.none() | st.booleans()),
        reasoning_parser_kwargs=draw(OBJECTS),
    )


@given(requests())
def test_request_comes_back_from_its_fields(request: Request) -> None:
    assert is_name(request.client)
    assert parse_request(entry_fields(request)) == request


def test_defaults_stay_off_the_wire() -> None:
    assert request_fields(Request(id="q1", prompt="x")) == {"id": "q1", "v": 1, "prompt": "x"}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (make_request(tokens=[1]), False),
        (make_request(prompt="x"), True),
        (make_request(messages=[{"role": "user"}]), True),
        (make_request(tokens=[1], params=SamplingParams(detokenize=True)), True),
        (make_request(prompt="x", params=SamplingParams(detokenize=False)), False),
    ],
)
def test_text_comes_back_where_text_went_in_or_as_asked(request_, expected: bool) -> None:
    assert request_.wants_text is expected


@pytest.mark.parametrize(
    ("sid", "entry", "waited_ms"),
    [
        ("normal/1000-5", "1250-0", 250),
        ("high/1250-0", "1250-1", 0),
        ("low/18446744073709551615-1", "1250-0", 0),  # a client's own idea of an entry id
    ],
)
def test_waiting_time_is_the_servers_and_never_negative(
    sid: str, entry: str, waited_ms: int
) -> None:
    assert make_assignment(sid=sid, entry=entry).waited_ms == waited_ms


@pytest.mark.parametrize(
    "made",
    [
        lambda: SamplingParams(seed=-1),
        lambda: msgspec.json.decode(b'{"seed":-1}', type=SamplingParams),
        lambda: msgspec.convert({"seed": -1}, SamplingParams),
        lambda: msgspec.structs.replace(SamplingParams(seed=3), seed=-1),
    ],
)
def test_a_seed_of_minus_one_is_none(made: Callable[[], SamplingParams]) -> None:
    assert made().seed is None
