"""Parts of the Responses API that need neither vLLM nor a broker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from gateway.http.context import Ticket
from gateway.http.errors import GatewayError
from gateway.responses.bodies import carried, for_front_end, listed, read_options
from gateway.responses.store import StoredResponse
from gateway.responses.tap import ResponseTap, failure

STORED = StoredResponse(
    "a" * 32, "http", 1000, "m", b"{}", previous="resp_before", is_background=True, is_stream=True
)
CREATED = {"id": STORED.id, "background": False, "previous_response_id": None, "status": "x"}
DELTA = b'event: response.output_text.delta\ndata: {"delta":"response.created"}\n\n'


def event(kind: str) -> bytes:
    content = {"response": CREATED, "sequence_number": 0, "type": kind}
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n".encode()


def head(status: int, kind: bytes) -> Message:
    headers = [(b"content-type", kind), (b"content-length", b"1")]
    return {"type": "http.response.start", "status": status, "headers": headers}


class Sink:
    """What a tap passes on."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ticket = Ticket()
        self.tap = ResponseTap(self._take, STORED, self.ticket)

    async def _take(self, message: Message) -> None:
        self.messages.append(message)

    def feed(self, *parts: bytes) -> bytes:
        """Stream these parts; what has come out."""
        self.send(head(200, b"text/event-stream; charset=utf-8"))
        for part in parts:
            self.send({"type": "http.response.body", "body": part, "more_body": True})
        return self.body

    def send(self, message: Message) -> None:
        asyncio.run(self.tap.send(message))

    def fail(self, error: GatewayError) -> None:
        asyncio.run(self.tap.fail(error))

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.messages)


def test_a_tap_completes_each_response_wherever_a_stream_is_cut() -> None:
    whole = event("response.created") + DELTA + event("response.completed")
    expected = Sink().feed(whole)
    for at in range(1, len(whole)):
        assert Sink().feed(whole[:at], whole[at:]) == expected
    assert expected.count(b'"previous_response_id":"resp_before"') == 2
    assert expected.count(b'"background":true') == 2
    assert DELTA in expected


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
def test_the_last_event_of_a_stream_has_the_final_response(kind: str) -> None:
    # vLLM sends the second from 0.33 on, where the text was cut.
    sink = Sink()
    sink.feed(event("response.created"), DELTA)
    assert sink.tap.final is None
    sink.feed(event(kind))
    assert sink.tap.final is not None
    assert sink.tap.final["previous_response_id"] == "resp_before"


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        ("CANCELLED", "response.incomplete", "cancelled"),
        ("INFERENCE_ERROR", "response.failed", "failed"),
    ],
)
def test_a_stream_that_breaks_off_gets_its_last_event(code: str, kind: str, status: str) -> None:
    sink = Sink()
    sink.feed(event("response.created"), DELTA)
    sink.fail(GatewayError(500, "why", code=code))

    last = sink.body.split(b"\n\n")[-2].decode()
    content = json.loads(last.partition("\ndata: ")[2])
    assert last.startswith(f"event: {kind}\n")
    assert (content["type"], content["sequence_number"]) == (kind, 2)
    assert content["response"]["status"] == status
    assert sink.messages[-1].get("more_body", False) is False


@pytest.mark.parametrize("is_explained", [True, False])
def test_a_500_is_passed_on_only_where_the_ticket_says_why(is_explained: bool) -> None:
    sink = Sink()
    if is_explained:
        sink.ticket.fail(GatewayError(429, "full"))
    sink.send(head(500, b"application/json"))
    sink.send({"type": "http.response.body", "body": b"{}"})
    assert sink.tap.status == 500
    assert bool(sink.messages) is is_explained


def test_the_answer_to_a_client_that_has_left_is_no_response() -> None:
    sink = Sink()
    sink.send(head(200, b"application/json"))
    sink.send({"type": "http.response.body", "body": b"null"})
    assert (sink.body, sink.tap.final) == (b"null", None)


def test_codes_are_those_of_openai() -> None:
    error = GatewayError(400, "why", code="INVALID_REQUEST")
    assert failure(error)["error"] == {"code": "invalid_prompt", "message": "why"}


def test_the_next_turn_reads_messages_and_calls() -> None:
    kept = {"type": "function_call", "call_id": "c"}
    output: list[dict[str, Any]] = [
        {"type": "reasoning", "content": []},
        {"type": "message", "content": []},
        kept | {"namespace": None},
    ]
    assert carried(output) == [kept]


def test_listed_items_have_ids_that_stay() -> None:
    given = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "id": "own"}]
    items = listed(STORED.id, given)
    assert items == listed(STORED.id, given)
    assert items[1]["id"] == "own"
    assert [item["content"][0]["type"] for item in items] == ["input_text", "output_text"]


@pytest.mark.parametrize("value", ["\ud800", float("nan"), float("inf")])
def test_what_is_no_json_in_utf_8_is_refused(value: object) -> None:
    body = {"input": "a", "metadata": {"a": value}}
    with pytest.raises(GatewayError) as refused:
        for_front_end(body, STORED.id, read_options(body))
    assert refused.value.status == 400


@pytest.mark.parametrize("value", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_would_have_no_effect_and_is_refused(value: object) -> None:
    with pytest.raises(GatewayError) as refused:
        read_options({"input": "a", "conversation": value})
    assert (refused.value.status, refused.value.param) == (400, "conversation")


@pytest.mark.parametrize("tools", [None, 5, [5], [{"type": "web_search"}], [{"type": "function"}]])
def test_tools_are_left_to_the_front_end(tools: object) -> None:
    assert not read_options({"input": "a", "tools": tools, "conversation": None}).is_stream


def test_the_front_end_gets_a_response_in_the_background_as_a_stream() -> None:
    body = {"input": "a", "background": True, "previous_response_id": "resp_x"}
    inner = json.loads(for_front_end(body, STORED.id, read_options(body)))
    assert inner == {
        "input": "a",
        "background": False,
        "stream": True,
        "request_id": STORED.id,
    }
