"""Answers as the client gets them: held back until the queue accepts, with event ids."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any, Final

from starlette.types import Message, Send

from gateway.http.context import RequestContext
from gateway.http.errors import (
    GatewayError,
    is_of_messages,
    message_of,
    messages_event,
    unavailable,
)
from tokenyard import clock

log = logging.getLogger("tokenyard.gateway")

#: Without a blank line, which the SDKs of OpenAI and Anthropic take for the end of an event.
KEEP_ALIVE: Final = b": keep-alive\n"
#: What a stream that another gateway can continue ends with. Clients of server-sent events read
#: from it when to ask again. Without a blank line, as in `KEEP_ALIVE`.
HINT: Final = b": this gateway is stopping; ask again with Last-Event-ID\nretry: %d\n"
#: The clients of a gateway lose their streams together and should not come back together.
_RETRY_MS: Final = (500, 1500)
Headers = Iterable[tuple[bytes, bytes]]


class Answer:
    """The `send` of one request, between vLLM's app and the server.

    The head of a stream is held back until the ticket is decided, so that a refusal by the queue
    still has its own status. Each event gets an id, unless the client's parser cannot bear it, and
    those up to ``after`` are left out. A stream that is silent for ``keep_alive_s`` gets a comment.
    """

    def __init__(
        self,
        send: Send,
        context: RequestContext,
        path: str,
        *,
        after: int = 0,
        keep_alive_s: float = 15.0,
    ) -> None:
        self._send = send
        self._context = context
        self._is_of_messages = is_of_messages(path)
        self._after = after
        self._keep_alive_s = keep_alive_s
        self._held: list[Message] = []  # head and body of a stream, until the ticket is decided
        self._is_stream = False
        self._is_held = False
        #: Whether the answer is an error of the gateway's instead of the app's.
        self.is_replaced = False
        self._rest = b""
        self._number = 0
        self._was_silent = True
        self._lock = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Take a message from the app."""
        async with self._lock:
            if message["type"] == "http.response.start":
                await self._take_head(message)
            elif self._is_held:
                self._held.append(message)
                if self._context.ticket.decided.is_set() or not message.get("more_body", False):
                    await self._release()
            elif not self.is_replaced:
                await self._pass_on(message)

    async def _take_head(self, head: Message) -> None:
        if self._context.ticket.error is not None:
            await self._refuse(self._context.ticket.error)
            return
        kind = dict(head["headers"]).get(b"content-type", b"")
        head["headers"] = [*head["headers"], *self._context.headers()]
        if head["status"] == 200 and kind.startswith(b"text/event-stream"):
            self._is_stream = self._is_held = True
            self._held.append(head)
            self._watch = asyncio.create_task(self._follow(), name="gateway-answer")
        else:
            await self._send(head)

    async def _follow(self) -> None:
        """Send what is held back once the ticket is decided, then comments in times of silence."""
        await self._context.ticket.decided.wait()
        async with self._lock:
            await self._release()
        while not self.is_replaced:
            self._was_silent = True
            await clock.pause(self._keep_alive_s)
            async with self._lock:
                if self._was_silent:
                    await self._send(
                        {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    )

    async def _release(self) -> None:
        held, self._held = self._held, []
        if not self._is_held:
            return
        self._is_held = False
        if self._context.ticket.error is not None:
            await self._refuse(self._context.ticket.error)
            return
        for message in held:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if not self._is_stream or message["type"] != "http.response.body":
            await self._send(message)
            return
        is_last = not message.get("more_body", False)
        events = self._number_events(message.get("body", b""), is_last=is_last)
        if events or is_last:
            self._was_silent = False
            await self._send(
                {"type": "http.response.body", "body": events, "more_body": not is_last}
            )
        if is_last:
            self._stop_following()

    def _number_events(self, body: bytes, *, is_last: bool) -> bytes:
        """Complete events with their ids, without those that the client has."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        if is_last and self._rest:
            events.append(self._rest)
            self._rest = b""
        out = []
        name = self._context.durable_id.encode()
        if self._context.ticket.error is not None:
            # The client does not have this error, though fewer events may come before it here than
            # it was shown: the result of a failed request need not have those tokens.
            self._number = max(self._number, self._after)
        for event in events:
            self._number += 1
            if self._number > self._after:
                own = b"id: %s:%d\n" % (name, self._number)
                head = own if self._context.has_event_ids else b""
                out.append(b"%s%s\n\n" % (head, self._in_form(event)))
        return b"".join(out)

    def _in_form(self, event: bytes) -> bytes:
        if not self._is_of_messages:
            return event
        return messages_event(event, self._context.ticket.error, self._context.durable_id)

    async def _refuse(self, error: GatewayError) -> None:
        self.is_replaced = True
        await send_error(self._send, error, self._context.headers())

    async def close(self) -> None:
        """Finish what is being sent, such as a refusal that frees its key first, and end there."""
        async with self._lock:
            self._stop_following()

    def _stop_following(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


class BodyErrors:
    """The `send` of vLLM's app, whose validation answers 500 to what it does not expect.

    Until the queue is asked, an answer depends on the body alone: to ask again does not help.
    """

    def __init__(self, send: Send, path: str, was_asked: Callable[[], bool]) -> None:
        self._send = send
        self._path = path
        self._was_asked = was_asked
        self._text = b""
        self.is_replaced = False

    async def send(self, message: Message) -> None:
        """Take a message from the app."""
        if message["type"] == "http.response.start":
            self.is_replaced = message["status"] == 500 and not self._was_asked()
        if not self.is_replaced:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._text += message.get("body", b"")
            if not message.get("more_body", False):
                await self._refuse()

    async def _refuse(self) -> None:
        why = message_of(self._text) or "it has a value that was not expected"
        log.warning("vLLM's front end failed at a body for %s: %s", self._path, why)
        message = f"the body cannot be rendered to a prompt: {why}"
        await send_error(self._send, GatewayError(400, message))


class CaughtAnswer:
    """An answer that no client gets."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    async def send(self, message: Message) -> None:
        """Take a message from the app."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


class OpenAnswer:
    """The `send` of one request, between the application and the server."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self._is_stream = False
        self._is_over = False

    async def send(self, message: Message) -> None:
        """Take a message from the application; after `interrupt` it is dropped."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self.has_begun = True
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        else:
            self._is_over = not message.get("more_body", False)
        await self._send(message)

    async def interrupt(self) -> None:
        """End the answer now: one that has not begun with 503, a stream with `HINT`.

        A stream gets no last chunk: that would say that it is whole.
        """
        if self._is_over:
            return
        self._is_over = True
        if not self.has_begun:
            await send_error(self._send, stopping())
        elif self._is_stream:
            hint = HINT % random.randint(*_RETRY_MS)
            await self._send({"type": "http.response.body", "body": hint, "more_body": True})


def stopping() -> GatewayError:
    """The error for requests that a stopping gateway does not answer."""
    return unavailable("this gateway is stopping; another one may serve")


async def send_error(send: Send, error: GatewayError, headers: Headers = ()) -> None:
    """A whole answer that is an error."""
    extra = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send_body(send, error.status, error.body(), [*headers, *extra])


async def send_body(
    send: Send, status: int, body: bytes, headers: Headers = (), kind: bytes = b"application/json"
) -> None:
    """A whole answer."""
    fixed: list[Any] = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
