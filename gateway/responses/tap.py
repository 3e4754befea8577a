"""What vLLM's front end sends for a response, completed by what only the gateway knows."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.types import Message, Send

from gateway.http.context import Ticket
from gateway.http.errors import GatewayError, as_json
from gateway.responses.store import StoredResponse
from tokenyard.protocol.errors import Code

Body = dict[str, Any]

#: Events that carry the whole response; the first opens a stream, the others end it.
_OPENING: Final = b"event: response.created\n"
_IN_PROGRESS: Final = b"event: response.in_progress\n"
#: From vLLM 0.33 on, a stream that was cut ends with the second.
_FINAL: Final = (b"event: response.completed\n", b"event: response.incomplete\n")
#: The whole answer of vLLM's to a client that has left.
_TO_NOBODY: Final = b"null"
#: Codes of OpenAI's for a response that failed.
_CODES: Final = {
    Code.INVALID_REQUEST.value: "invalid_prompt",
    Code.QUEUE_FULL.value: "rate_limit_exceeded",
    Code.QUOTA_EXCEEDED.value: "rate_limit_exceeded",
}


class ResponseTap:
    """The `send` of one call of vLLM's app; passes on what it gets.

    vLLM sees neither `background` nor `previous_response_id`: the tap writes them into each
    response. A stream that breaks off because its request failed gets its last event here. A 500
    of vLLM's is not passed on, unless the ticket says why.
    """

    def __init__(self, send: Send, stored: StoredResponse, ticket: Ticket) -> None:
        self._send = send
        self._stored = stored
        self._ticket = ticket
        self._head: Message = {}
        self._is_stream = False
        self._rest = b""
        self._count = 0  # of events
        self.opening: Body | None = None
        self.final: Body | None = None

    @property
    def status(self) -> int:
        """The status of the answer; 0 before it."""
        status: int = self._head.get("status", 0)
        return status

    async def send(self, message: Message) -> None:
        """Take a message from the app."""
        if message["type"] == "http.response.start":
            self._head = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if self._is_stream:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_stream:
            await self._take_events(message)
        else:
            await self._take_body(message)

    async def _take_body(self, message: Message) -> None:
        self._rest += message.get("body", b"")
        if message.get("more_body", False):
            return
        if self.status >= 500 and self._ticket.error is None:
            return
        body, self._rest = self._rest, b""
        if self.status == 200 and body != _TO_NOBODY:
            self.final = self._complete(json.loads(body))
            body = as_json(self.final)
        kept = [one for one in self._head["headers"] if one[0] != b"content-length"]
        length = (b"content-length", b"%d" % len(body))
        await self._send({**self._head, "headers": [*kept, length]})
        await self._send({"type": "http.response.body", "body": body})

    async def _take_events(self, message: Message) -> None:
        *events, self._rest = (self._rest + message.get("body", b"")).split(b"\n\n")
        self._count += len(events)
        out = b"".join(self._event(event) + b"\n\n" for event in events)
        await self._send(
            {**message, "body": out + (b"" if message.get("more_body") else self._rest)}
        )

    def _event(self, event: bytes) -> bytes:
        if not event.startswith((_OPENING, _IN_PROGRESS, *_FINAL)):
            return event
        kind, _, data = event.partition(b"\ndata: ")
        content = json.loads(data)
        content["response"] = self._complete(content["response"])
        if event.startswith(_OPENING):
            self.opening = content["response"]
        elif event.startswith(_FINAL):
            self.final = content["response"]
        return kind + b"\ndata: " + as_json(content)

    def _complete(self, response: Body) -> Body:
        return response | {
            "background": self._stored.is_background,
            "previous_response_id": self._stored.previous,
        }

    async def fail(self, error: GatewayError) -> None:
        """End a stream whose request failed."""
        if not self._is_stream or self.opening is None:
            return
        response = self.opening | failure(error)
        kind = "response.failed" if response["status"] == "failed" else "response.incomplete"
        content = {"response": response, "sequence_number": self._count, "type": kind}
        event = f"event: {kind}\ndata: ".encode() + as_json(content) + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


def failure(error: GatewayError) -> Body:
    """The fields of a response whose request ended without an answer."""
    if error.code == Code.CANCELLED.value:
        return {"status": "cancelled"}
    code = _CODES.get(str(error.code), "server_error")
    return {"status": "failed", "error": {"code": code, "message": error.message}}
