"""Errors as Anthropic's clients expect them, from the gateway and from vLLM's front end."""

from __future__ import annotations

import secrets
from typing import Final

from starlette.types import Message, Send

from gateway.http.errors import GatewayError, as_json, message_of

PATH: Final = "/v1/messages"
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_UNKNOWN: Final = "the request failed"
_EVENT: Final = b"event: error\n"


def is_of_messages(path: str) -> bool:
    """Whether the clients of a path are Anthropic's."""
    return path == PATH or path.startswith(PATH + "/")


def error_type(status: int) -> str:
    """Anthropic's type of an error, by its HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(status: int, message: str, request_id: str) -> bytes:
    """The JSON of an error."""
    inner = {"type": error_type(status), "message": message}
    return as_json({"type": "error", "error": inner, "request_id": request_id})


def error_event(event: bytes, error: GatewayError | None, request_id: str) -> bytes:
    """An event of a stream, where it is an error in Anthropic's form.

    vLLM's front end calls every error an internal one; ``error`` is what the queue knows of it.
    """
    if not event.startswith(_EVENT):
        return event
    if error is None:
        text = event.partition(b"data: ")[2]
        error = GatewayError(500, message_of(text) or _UNKNOWN)
    return _EVENT + b"data: " + error_body(error.status, error.message, request_id)


class MessagesAnswer:
    """The `send` of one request of Anthropic's API: names the request, and rewrites its errors."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._request_id = ""
        self._refusal: Message | None = None
        self._text = b""

    async def send(self, message: Message) -> None:
        """Take a message from the gateway."""
        if message["type"] == "http.response.start":
            given = dict(message["headers"]).get(b"x-request-id")
            self._request_id = secrets.token_hex(16) if given is None else given.decode("latin-1")
            named = (b"request-id", self._request_id.encode("latin-1"))
            head = {**message, "headers": [*message["headers"], named]}
            if message["status"] >= 400:
                self._refusal = head
            else:
                await self._send(head)
        elif self._refusal is None:
            await self._send(message)
        else:
            self._text += message.get("body", b"")
            if not message.get("more_body", False):
                await self._refuse(self._refusal)

    async def _refuse(self, head: Message) -> None:
        message = message_of(self._text) or _UNKNOWN
        body = error_body(head["status"], message, self._request_id)
        kept = [one for one in head["headers"] if one[0] != b"content-length"]
        length = (b"content-length", b"%d" % len(body))
        await self._send({**head, "headers": [*kept, length]})
        await self._send({"type": "http.response.body", "body": body})
