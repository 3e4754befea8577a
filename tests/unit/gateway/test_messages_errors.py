"""Errors on the endpoints of Anthropic's API, whoever finds them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.http.errors import GatewayError, MessagesAnswer, is_of_messages, of_result
from gateway.http.sse import send_body, send_error
from tests.unit.gateway.test_answer import NAME, Connection, body, head
from tokenyard.protocol.replies import ErrorInfo

OPENAI = {"error": {"message": "why", "type": "Bad Request", "param": "temperature", "code": 400}}
#: As vLLM's endpoint has it.
OF_VLLM = {"type": "error", "error": {"type": "BadRequestError", "message": "why"}}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def answered(status: int, text: bytes, *headers: tuple[bytes, bytes]) -> Connection:
    connection = Connection()
    asyncio.run(send_body(MessagesAnswer(connection.send).send, status, text, headers))
    assert int(connection.headers[b"content-length"]) == len(connection.body)
    return connection


@pytest.mark.parametrize("theirs", [OPENAI, OF_VLLM], ids=["handlers", "endpoint"])
@pytest.mark.parametrize(("status", "kind"), TYPES.items())
def test_an_error_of_the_front_end_gets_anthropics_form(
    status: int, kind: str, theirs: dict[str, Any]
) -> None:
    connection = answered(status, json.dumps(theirs).encode(), (b"x-request-id", NAME.encode()))

    assert connection.head["status"] == status
    assert connection.headers[b"request-id"] == NAME.encode()
    assert json.loads(connection.body) == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
        "request_id": NAME,
    }


@pytest.mark.parametrize("text", [b"", b"Internal Server Error", b"[]", b'{"error": "why"}'])
def test_an_error_without_a_message_has_one(text: bytes) -> None:
    error = json.loads(answered(500, text).body)

    assert error["error"] == {"type": "api_error", "message": "the request failed"}
    assert len(error["request_id"]) == 32


def test_an_error_of_the_gateway_keeps_its_headers() -> None:
    full = GatewayError(429, "the queue is full", retry_after_s=2.5)
    connection = Connection()
    asyncio.run(send_error(MessagesAnswer(connection.send).send, full))

    assert connection.headers[b"retry-after"] == b"3"
    assert json.loads(connection.body)["error"]["message"] == "the queue is full"


async def test_an_answer_is_named_and_left_alone() -> None:
    connection = Connection()
    one = MessagesAnswer(connection.send)
    await one.send(head())
    await one.send(body(b"event: error\n\n"))
    await one.send(body(b"", more=False))
    assert len(connection.headers[b"request-id"]) == 32
    assert connection.body == b"event: error\n\n"


def test_the_paths_of_anthropics_api() -> None:
    assert is_of_messages("/v1/messages")
    assert is_of_messages("/v1/messages/count_tokens")
    assert not is_of_messages("/v1/messages_of_others")


def test_a_model_that_cannot_be_loaded_is_overloaded_for_now() -> None:
    reason = "model: m: it could not be loaded, 3 times in a row on gpu: no option 'x'"
    connection = Connection()
    error = of_result(ErrorInfo("MODEL_UNAVAILABLE", reason))
    asyncio.run(send_error(MessagesAnswer(connection.send).send, error))

    assert connection.head["status"] == 503
    assert connection.headers[b"retry-after"] == b"10"
    assert json.loads(connection.body)["error"] == {"type": "overloaded_error", "message": reason}
