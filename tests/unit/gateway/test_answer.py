"""The answer on its way from vLLM's app to the connection."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from gateway.http.context import RequestContext, Ticket
from gateway.http.errors import GatewayError, of_result
from gateway.http.sse import HINT, KEEP_ALIVE, Answer, OpenAnswer
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import ErrorInfo

NAME = "0123456789abcdef0123456789abcdef"
FULL = GatewayError(429, "the queue is full", retry_after_s=2.5)
STREAM = {"type": "http.response.start", "status": 200}
STREAM["headers"] = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Connection:
    """What the client would get."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.body = b""
        self.is_over = False
        self.changed = asyncio.Event()

    async def send(self, message: Any) -> None:
        assert not self.is_over
        if message["type"] == "http.response.start":
            assert not self.head
            self.head = message
        else:
            assert self.head, "the head comes first"
            self.body += message["body"]
            self.is_over = not message.get("more_body", False)
        self.changed.set()

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.head["headers"])


def answer(
    connection: Connection,
    *,
    path: str = "/v1/completions",
    after: int = 0,
    keep_alive_s: float = 60.0,
) -> Answer:
    context = RequestContext(NAME, "http", 0.0)
    return Answer(connection.send, context, path, after=after, keep_alive_s=keep_alive_s)


def body(text: bytes, *, more: bool = True) -> Any:
    return {"type": "http.response.body", "body": text, "more_body": more}


def head() -> Any:
    return {**STREAM, "headers": list(STREAM["headers"])}  # type: ignore[arg-type]


async def test_the_head_of_a_stream_waits_for_the_queue() -> None:
    connection = Connection()
    one = answer(connection)
    await one.send(head())
    await one.send(body(b"data: 1\n\n"))
    await asyncio.sleep(0)
    assert not connection.head
    one._context.ticket.accept()
    await connection.changed.wait()
    await one.send(body(b"data: [DONE]\n\n", more=False))
    assert connection.head["status"] == 200
    assert connection.headers[b"x-request-id"] == NAME.encode()
    assert connection.is_over
    expected = f"id: {NAME}:1\ndata: 1\n\nid: {NAME}:2\ndata: [DONE]\n\n"
    assert connection.body == expected.encode()


async def test_the_head_does_not_wait_for_the_first_event() -> None:
    connection = Connection()
    one = answer(connection)
    await one.send(head())
    one._context.ticket.accept()
    await connection.changed.wait()
    assert connection.head["status"] == 200
    await one.close()


async def test_a_refusal_by_the_queue_takes_the_place_of_a_stream() -> None:
    connection = Connection()
    one = answer(connection)
    await one.send(head())
    await one.send(body(b"event: response.created\ndata: {}\n\n"))
    one._context.ticket.fail(FULL)
    await one.send(body(b"data: error\n\n", more=False))
    assert one.is_replaced
    assert connection.head["status"] == 429
    assert connection.headers[b"retry-after"] == b"3"
    assert connection.headers[b"retry-after-ms"] == b"2500"
    assert connection.headers[b"x-should-retry"] == b"true"
    assert json.loads(connection.body)["error"]["message"] == "the queue is full"
    assert connection.is_over


async def ended_while_sending(settle: Callable[[Ticket], None]) -> Connection:
    """What is sent of an answer whose app ends in the midst of it.

    The head waits, as that of a refusal does until its key is free.
    """
    connection, is_sending, is_free = Connection(), asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        is_sending.set()
        await is_free.wait()
        await connection.send(message)

    one = Answer(send, RequestContext(NAME, "http", 0.0), "/v1/responses")
    await one.send(head())
    await one.send(body(b"data: 1\n\n"))
    settle(one._context.ticket)
    await is_sending.wait()
    closing = asyncio.create_task(one.close())
    await asyncio.sleep(0)
    is_free.set()
    await closing
    return connection


async def test_a_refusal_is_sent_whole_whenever_the_app_ends() -> None:
    connection = await ended_while_sending(lambda ticket: ticket.fail(FULL))
    assert connection.head["status"] == 429
    assert connection.body == FULL.body()
    assert connection.is_over


async def test_what_was_held_back_is_sent_whole_whenever_the_app_ends() -> None:
    connection = await ended_while_sending(Ticket.accept)
    assert connection.head["status"] == 200
    assert connection.body == b"id: %s:1\ndata: 1\n\n" % NAME.encode()


async def test_a_refusal_takes_the_place_of_whatever_status_the_app_gives_it() -> None:
    connection = Connection()
    one = answer(connection)
    one._context.ticket.fail(FULL)
    await one.send({"type": "http.response.start", "status": 500, "headers": []})
    await one.send(body(b"Internal Server Error", more=False))
    assert connection.head["status"] == 429
    assert b"Internal" not in connection.body


async def test_an_error_of_the_app_without_a_submission_is_passed_on() -> None:
    connection = Connection()
    one = answer(connection)
    await one.send({"type": "http.response.start", "status": 400, "headers": []})
    await one.send(body(b"no", more=False))
    assert (connection.head["status"], connection.body) == (400, b"no")


async def test_a_stream_that_ends_without_a_submission_is_passed_on() -> None:
    connection = Connection()
    one = answer(connection)
    await one.send(head())
    await one.send(body(b"data: broken parser\n\n"))
    await one.send(body(b"", more=False))
    assert connection.head["status"] == 200
    assert b"broken parser" in connection.body
    assert connection.is_over


@pytest.mark.parametrize("after", range(4))
async def test_events_that_the_client_has_are_left_out(after: int) -> None:
    whole, rest = Connection(), Connection()
    for connection, skipped in ((whole, 0), (rest, after)):
        one = answer(connection, after=skipped)
        one._context.ticket.accept()
        await one.send(head())
        await one.send(body(b"data: 1\n\nda"))
        await one.send(body(b"ta: 2\n"))
        await one.send(body(b"\ndata: 3\n\n", more=False))
    known = b"".join(f"id: {NAME}:{n}\ndata: {n}\n\n".encode() for n in range(1, after + 1))
    assert known + rest.body == whole.body
    assert whole.body.count(b"id: ") == 3


async def test_a_silent_stream_gets_comments_that_are_not_counted() -> None:
    connection = Connection()
    one = answer(connection, keep_alive_s=0.01)
    one._context.ticket.accept()
    await one.send(head())
    while connection.body.count(KEEP_ALIVE) < 2:
        connection.changed.clear()
        await connection.changed.wait()
    await one.send(body(b"data: 1\n\n", more=False))
    assert connection.body.endswith(f"id: {NAME}:1\ndata: 1\n\n".encode())


@pytest.mark.long
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_the_sdks_see_no_event_in_a_comment_or_a_hint(sdk: str) -> None:
    decoder = pytest.importorskip(f"{sdk}._streaming").SSEDecoder()
    event = b"id: %s:1\ndata: {}\n\n" % NAME.encode()
    seen = decoder.iter_bytes(iter([event, KEEP_ALIVE, KEEP_ALIVE, event, HINT % 1000]))
    assert [one.data for one in seen] == ["{}", "{}"]


@pytest.mark.parametrize(
    ("of_queue", "status", "message"),
    [
        (GatewayError(504, "too late"), "timeout_error", "too late"),
        (None, "api_error", "no valid JSON"),
    ],
    ids=["of-the-queue", "of-the-front-end"],
)
async def test_an_error_inside_a_stream_of_messages_has_anthropics_form(
    of_queue: GatewayError | None, status: str, message: str
) -> None:
    connection = Connection()
    one = answer(connection, path="/v1/messages")
    await one.send(head())
    one._context.ticket.accept()
    await one.send(body(b"event: message_start\ndata: {}\n\n"))
    one._context.ticket.error = of_queue
    theirs = {"type": "error", "error": {"type": "internal_error", "message": "no valid JSON"}}
    event = b"event: error\ndata: %s\n\n" % json.dumps(theirs).encode()
    await one.send(body(event, more=False))
    *_, last = connection.body.decode().rstrip().split("\n\n")
    name, kind, data = last.split("\n")
    assert (name, kind) == (f"id: {NAME}:2", "event: error")
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": status, "message": message},
        "request_id": NAME,
    }


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.INVALID_REQUEST, 400),
        (Code.CANCELLED, 409),
        (Code.ID_REUSED, 422),
        (Code.QUEUE_FULL, 429),
        (Code.QUOTA_EXCEEDED, 429),
        (Code.INFERENCE_ERROR, 500),
        (Code.MODEL_UNAVAILABLE, 503),
        (Code.DEADLINE_EXCEEDED, 504),
    ],
)
def test_a_failed_result_has_its_status(code: Code, status: int) -> None:
    assert of_result(ErrorInfo(code, "the reason")).status == status


async def test_the_error_that_ends_a_stream_comes_behind_any_event() -> None:
    # Given a client that was shown five events by a gateway that is gone
    connection = Connection()
    one = answer(connection, after=5)
    one._context.ticket.accept()
    await one.send(head())
    await one.send(body(b"data: 1\n\n"))

    # If the request has failed, and its result has fewer tokens
    one._context.ticket.fail(of_result(ErrorInfo(Code.ENTRY_LOST, "gone")))
    await one.send(body(b"data: error\n\n"))
    await one.send(body(b"data: [DONE]\n\n", more=False))

    # I expect the client to have the error.
    expected = f"id: {NAME}:6\ndata: error\n\nid: {NAME}:7\ndata: [DONE]\n\n"
    assert connection.body == expected.encode()


# An answer that a stopping gateway ends early.

EVENT = b"id: %s:1\ndata: {}\n\n" % (b"0" * 32)


def open_head(kind: bytes) -> Any:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


async def test_a_stream_ends_with_a_hint_and_is_not_completed() -> None:
    connection = Connection()
    one = OpenAnswer(connection.send)
    await one.send(open_head(b"text/event-stream; charset=utf-8"))
    await one.send(body(EVENT))
    await one.interrupt()
    await one.interrupt()
    await one.send(body(EVENT))
    await one.send(body(b"", more=False))
    hint = connection.body.removeprefix(EVENT)
    (retry,) = re.fullmatch(rb": .*\nretry: (\d+)\n", hint).groups()  # type: ignore[union-attr]
    assert 500 <= int(retry) <= 1500
    assert not connection.is_over


async def test_an_answer_that_has_not_begun_is_503() -> None:
    connection = Connection()
    one = OpenAnswer(connection.send)
    await one.interrupt()
    await one.send(open_head(b"application/json"))
    await one.send(body(b"{}", more=False))
    assert connection.head["status"] == 503
    assert connection.headers[b"retry-after"] == b"1"
    assert json.loads(connection.body)["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_an_answer_that_is_over_stays_as_it_is(kind: bytes) -> None:
    connection = Connection()
    one = OpenAnswer(connection.send)
    await one.send(open_head(kind))
    await one.send(body(b"{}", more=False))
    await one.interrupt()
    assert connection.body == b"{}"
    assert connection.is_over


async def test_no_hint_is_written_into_what_is_no_stream() -> None:
    connection = Connection()
    one = OpenAnswer(connection.send)
    await one.send(open_head(b"application/octet-stream"))
    await one.send(body(b"half"))
    await one.interrupt()
    assert connection.body == b"half"
