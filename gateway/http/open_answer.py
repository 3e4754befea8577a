"""One request and as much of its answer as was sent: a gateway that stops can end it."""

from __future__ import annotations

import random
from typing import Final

from starlette.types import Message, Send

from gateway.http.errors import GatewayError, unavailable
from gateway.http.sse import send_error

#: What a stream that another gateway can continue ends with. Clients of server-sent events read
#: from it when to ask again. Without a blank line, as in `KEEP_ALIVE`.
HINT: Final = b": this gateway is stopping; ask again with Last-Event-ID\nretry: %d\n"
#: The clients of a gateway lose their streams together and should not come back together.
_RETRY_MS: Final = (500, 1500)


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
