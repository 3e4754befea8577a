"""Answers as the client gets them: held back until the queue accepts, with event ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from starlette.types import Message, Send

from gateway.context import RequestContext
from gateway.errors import GatewayError

KEEP_ALIVE: Final = b": keep-alive\n\n"
Headers = Iterable[tuple[bytes, bytes]]


class Answer:
    """The `send` of one request, between vLLM's app and the server.

    The head of a stream is held back until the ticket is decided, so that a refusal by the queue
    still has its own status. Each event gets an id, and those up to ``after`` are left out.
    """

    def __init__(
        self,
        send: Send,
        context: RequestContext,
        path: str,
        headers: Headers,
        *,
        after: int = 0,
        keep_alive_s: float = 15.0,
    ) -> None:
        self._send = send
        self._context = context
        self._path = path
        self._headers = list(headers)
        self._after = after
        self._keep_alive_s = keep_alive_s
        self._head: Message | None = None  # held back
        self._is_stream = False
        self._has_begun = False
        self._is_replaced = False
        self._rest = b""
        self._number = 0
        self._lock = asyncio.Lock()
        self._silence: asyncio.Task[None] | None = None

    @property
    def is_replaced(self) -> bool:
        """Whether the answer is an error of the gateway's instead of the app's."""
        return self._is_replaced

    async def send(self, message: Message) -> None:
        """Take a message from the app."""
        if self._is_replaced:
            return
        if message["type"] == "http.response.start":
            await self._take_head(message)
        elif message["type"] == "http.response.body":
            await self._take_body(message)
        else:
            await self._send(message)

    async def _take_head(self, head: Message) -> None:
        if self._context.ticket.error is not None:
            await self.refuse(self._context.ticket.error)
            return
        kind = dict(head["headers"]).get(b"content-type", b"")
        head["headers"] = [*head["headers"], *self._headers]
        if head["status"] == 200 and kind.startswith(b"text/event-stream"):
            self._is_stream = True
            self._head = head
            self._silence = asyncio.create_task(self._keep_alive())
        else:
            self._has_begun = True
            await self._send(head)

    async def _take_body(self, message: Message) -> None:
        if not self._is_stream:
            await self._send(message)
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if body or is_last:
            await self._begin()
        if self._is_replaced:
            return
        async with self._lock:
            events = self._number_events(body, is_last=is_last)
            if events or is_last:
                await self._send(
                    {"type": "http.response.body", "body": events, "more_body": not is_last}
                )
        if is_last:
            self.close()

    def _number_events(self, body: bytes, *, is_last: bool) -> bytes:
        """Complete events with their ids, without those that the client has."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        if is_last and self._rest:
            events.append(self._rest)
            self._rest = b""
        out = []
        name = self._context.durable_id.encode()
        for event in events:
            if event.startswith(b":"):
                out.append(event + b"\n\n")
                continue
            self._number += 1
            if self._number > self._after:
                out.append(b"id: %s:%d\n%s\n\n" % (name, self._number, event))
        return b"".join(out)

    async def _begin(self) -> None:
        """Send the head once the queue has accepted, or the refusal instead."""
        await self._context.ticket.decided.wait()
        async with self._lock:
            head, self._head = self._head, None
            if head is None:
                return
            if self._context.ticket.error is not None and not self._has_begun:
                await self._refuse(self._context.ticket.error)
                return
            self._has_begun = True
            await self._send(head)

    async def _keep_alive(self) -> None:
        """Send the head as soon as possible, and comments while nothing else is sent."""
        await self._begin()
        while not self._is_replaced and not self._number:
            await asyncio.sleep(self._keep_alive_s)
            async with self._lock:
                if not self._number:
                    await self._send(
                        {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    )

    async def refuse(self, error: GatewayError) -> None:
        """Answer with an error, unless an answer has begun."""
        async with self._lock:
            if not self._has_begun:
                await self._refuse(error)
        self.close()

    async def _refuse(self, error: GatewayError) -> None:
        self._has_begun = self._is_replaced = True
        await send_error(self._send, error, self._path, self._headers)

    def close(self) -> None:
        """End the task that keeps the connection alive."""
        if self._silence is not None and self._silence is not asyncio.current_task():
            self._silence.cancel()


async def send_error(send: Send, error: GatewayError, path: str, headers: Headers = ()) -> None:
    """A whole answer that is an error."""
    extra = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send_body(send, error.status, error.body(path), [*headers, *extra])


async def send_body(
    send: Send, status: int, body: bytes, headers: Headers = (), kind: bytes = b"application/json"
) -> None:
    """A whole answer."""
    fixed: list[Any] = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
