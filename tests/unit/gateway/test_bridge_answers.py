"""From the replies to a request to what its front end gets."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gateway.bridge.answers import Answer
from gateway.bridge.engine_core import Channel
from gateway.bridge.journal import Journal
from gateway.bridge.requests import Asked
from gateway.queue.replies import ReplyStream
from tests.support.builders import make_request
from tokenyard.client.pending import PendingRequest
from tokenyard.protocol.errors import Code, TokenyardError
from tokenyard.protocol.replies import ErrorInfo, Reply, json_text, refusal
from tokenyard.protocol.wire import pack_tokens

NOBODY: Any = None


def answer(*, is_kept: bool = False) -> Answer:
    """An answer to a prompt of three tokens."""
    asked = Asked(make_request("r"), "normal", is_kept)
    found = Answer("front", 3, asked, cast(Channel, NOBODY), cast(Journal, NOBODY))
    found.stream = ReplyStream("http", PendingRequest("r", None, 0.0))
    return found


def take(one: Answer, *replies: Reply) -> list[list[Any]]:
    """What goes to the front end when these come."""
    assert one.stream
    for reply in replies:
        one.stream.pending.take(reply, 0.0)
    return one.read("told")


def delta(seq: int, *tokens: int, **more: Any) -> Reply:
    return Reply(id="r", event="delta", seq=seq, tokens=pack_tokens(tokens), **more)


def result(*tokens: int, **more: Any) -> Reply:
    values = {"status": "completed", "finish_reason": "length"} | more
    return Reply(id="r", event="result", seq=len(tokens), tokens=pack_tokens(tokens), **values)


def test_the_first_piece_says_what_was_cached() -> None:
    one = answer()
    first, second = take(one, delta(0, 5, cached_tokens=2), delta(1, 6, 7))
    assert (first[1], first[11]["num_cached_tokens"]) == ([5], 2)
    assert second == ["front", [6, 7]]
    (last,) = take(one, result(5, 6, 7, 8))
    assert (last[1], last[5]) == ([8], 1)


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_logprobs_of_a_prompt_come_first(*, is_kept: bool) -> None:
    entry = {"token": 2, "logprob": -1.0, "rank": 1, "top": []}
    prompt = json_text([None, entry, entry])
    found = take(answer(is_kept=is_kept), result(5, 6, prompt_logprobs=prompt))
    assert [one[1] for one in found] == ([[5], [6]] if is_kept else [[5, 6]])
    assert [one[3] is not None for one in found] == ([True, False] if is_kept else [True])


def test_a_piece_of_a_kept_answer_is_a_token() -> None:
    row = {"logprob": -1.0, "rank": 1, "top": []}
    rows = json_text([{"token": token, **row} for token in (5, 6)])
    found = take(answer(is_kept=True), delta(0, 5, 6, logprobs=rows))
    assert [one[1] for one in found] == [[5], [6]]
    assert all(one[2] for one in found)


def test_a_failure_is_an_error_with_its_reason() -> None:
    codes = {Code.INVALID_REQUEST: "validation_error", Code.MODEL_UNAVAILABLE: "generation_error"}
    for code, wanted in codes.items():
        one = answer()
        ((*_, error),) = take(one, refusal(make_request("r"), code, "why"))
        assert (error["code"], error["message"]) == (wanted, "why")
        assert error["retryable"] == (code == Code.MODEL_UNAVAILABLE)
        assert one.fault == "why"
    one = answer()
    assert one.stream
    one.stream.pending.fail(TokenyardError("gone"))
    assert one.read("bare")[0][5] == 3
    failed = result(status="failed", error=json_text(ErrorInfo(Code.WORKER_LOST, "lost")))
    assert take(answer(), failed)[0][18]["message"] == "lost"


def test_numbers_are_the_whole_answer() -> None:
    ends = {"shapes": json_text([[2]]), "input_tokens": json_text([3])}
    (made,) = take(answer(), result(**ends, data=b"12345678"))
    assert (made[1], made[5]) == ([], 0)
    kind, shape, numbers = made[4]
    assert (kind, shape, numbers.data) == ("float32", [2], b"12345678")
    assert made[11]["num_prompt_tokens"] == 3


def test_an_input_that_has_no_numbers_is_an_error_with_its_reason() -> None:
    why = json_text({0: ErrorInfo(Code.INVALID_REQUEST, "too long")})
    (made,) = take(answer(), result(data=b"", shapes="[null]", errors=why))
    assert (made[5], made[18]["message"], made[18]["code"]) == (3, "too long", "validation_error")
