"""Bodies at which vLLM's front end fails before the queue is asked: they are the client's error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from starlette.types import Message, Send

from gateway.http.errors import GatewayError
from gateway.http.sse import send_error

log = logging.getLogger("tokenyard.gateway")


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
        try:
            why = str(json.loads(self._text)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            why = "it has a value that was not expected"
        log.warning("vLLM's front end failed at a body for %s: %s", self._path, why)
        message = f"the body cannot be rendered to a prompt: {why}"
        await send_error(self._send, GatewayError(400, message))
