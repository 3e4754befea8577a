"""protocol.replies: the same reply from a frame, from plain fields and from the ledger."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import make_delta, make_result, stored
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import (
    TERMINAL,
    Choice,
    Delta,
    ErrorInfo,
    Provenance,
    Reply,
    Result,
    Timing,
    Usage,
    decode_replies,
    decode_reply,
    encode_reply,
    json_text,
    refusal,
    to_delta,
    to_result,
)
from tokenyard.protocol.wire import Refused, Request, pack_tokens

TEXTS = st.none() | st.text(max_size=30) | st.sampled_from(["null", "1", "true", "0.5", "{}"])
REPLIES = st.builds(
    Reply,
    id=st.text(min_size=1, max_size=20),
    event=st.sampled_from(["delta", "result"]),
    seq=st.integers(0, 2**32 - 1),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=20).map(pack_tokens),
    text=TEXTS,
    index=st.integers(0, 63),
    logprobs=TEXTS,
    status=st.none() | st.sampled_from(sorted(TERMINAL)),
    finish_reason=TEXTS,
    stop_reason=TEXTS,
    usage=TEXTS,
    error=TEXTS,
    provenance=TEXTS,
    timing=TEXTS,
    choices=TEXTS,
    prompt_logprobs=TEXTS,
    cached_tokens=st.none() | st.integers(0, 2**31 - 1),
    created_cache_tokens=st.none() | st.integers(0, 2**31 - 1),
)


def plain(reply: Reply) -> dict[bytes, bytes]:
    """The entry that `flat` makes of a reply."""
    return stored(msgspec.msgpack.decode(encode_reply(reply)))


@given(REPLIES)
def test_ledger_gives_back_what_was_put_in(reply: Reply) -> None:
    assert decode_reply(encode_reply(reply)) == reply


@given(REPLIES)
def test_plain_entry_is_the_reply(reply: Reply) -> None:
    assert decode_replies(plain(reply)) == [reply]


@given(st.lists(REPLIES, max_size=4))
def test_frame_is_an_array_of_replies(replies: list[Reply]) -> None:
    head = b"\xdd" + len(replies).to_bytes(4, "big")
    frame = head + b"".join(encode_reply(reply) for reply in replies)

    assert decode_replies({b"frame": frame}) == replies


def test_fields_of_a_later_version_are_skipped() -> None:
    reply = make_delta("q1", 0, [1])
    fields = msgspec.msgpack.decode(encode_reply(reply)) | {"flavour": "sweet"}

    assert decode_replies(plain(reply) | {b"flavour": b"sweet"}) == [reply]
    assert decode_replies({b"frame": msgspec.msgpack.encode([fields])}) == [reply]
    assert decode_reply(msgspec.msgpack.encode(fields)) == reply


def test_defaults_stay_off_the_wire() -> None:
    assert plain(make_delta("q1", 3, [1])).keys() == {b"id", b"event", b"seq", b"tokens"}


def test_delta_as_a_user_holds_it() -> None:
    reply = make_delta("q1", 3, [1, 2], text="AB", index=1, logprobs='[{"1":-0.5},{}]')

    assert to_delta(reply) == Delta("q1", 3, [1, 2], "AB", 1, [{"1": -0.5}, {}])


def test_result_as_a_user_holds_it() -> None:
    provenance = Provenance("adder", "r1", "vllm", "0.32", "w.1", 2, seed=7)
    choices = [Choice(0, [1]), Choice(1, [2], text="b", stop_reason=5)]
    reply = make_result(
        "q1",
        [1, 2],
        seq=1,
        text="AB",
        finish_reason="stop",
        stop_reason='"\\n"',
        usage=json_text(Usage(3, 2, 5)),
        provenance=json_text(provenance),
        timing=json_text(Timing(4, 5.5, 0.25)),
        choices=json_text(choices),
        logprobs="[{}]",
        prompt_logprobs="[null,{}]",
    )

    assert to_result(reply) == Result(
        id="q1",
        status="completed",
        tokens=[1, 2],
        seq=1,
        text="AB",
        finish_reason="stop",
        stop_reason="\n",
        usage=Usage(3, 2, 5),
        provenance=provenance,
        timing=Timing(4, 5.5, 0.25),
        choices=choices,
        logprobs=[{}],
        prompt_logprobs=[None, {}],
    )


@pytest.mark.parametrize(("text", "expected"), [("7", 7), ('"7"', "7"), (None, None)])
def test_stop_reason_keeps_its_type(text: str | None, expected: int | str | None) -> None:
    assert to_result(make_result("q1", stop_reason=text)).stop_reason == expected


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_only_a_completed_result_is_ok(status) -> None:
    assert to_result(make_result("q1", status=status)).ok is (status == "completed")


@pytest.mark.parametrize(
    "request_",
    [Request(id="q1", prompt="x"), Refused("q1", "anon", "", Code.INVALID_REQUEST, "x")],
)
def test_refusal_is_a_result_with_the_tokens_that_were_seen(request_) -> None:
    seen = pack_tokens([1, 2])

    result = to_result(refusal(request_, Code.DEADLINE_EXCEEDED, "too late", published=seen))

    assert (result.status, result.tokens, result.seq) == ("expired", [1, 2], 2)
    assert result.error == ErrorInfo("DEADLINE_EXCEEDED", "too late")
