"""Responses that clients can ask for again, on any gateway."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.http.errors import GatewayError
from gateway.queue.yard import YardQueue
from tokenyard.broker.connection import translated
from tokenyard.scripts import Cancelled

#: What the id of a response has in front of its durable id.
PREFIX: Final = "resp_"
_ID: Final = re.compile(PREFIX + "([0-9a-f]{32})")
_UNFINISHED: Final = {"waiting": "queued", "assigned": "in_progress"}


class StoredResponse(Struct, frozen=True):
    """What vLLM's front end needs to write a response again; its tokens are on the queue."""

    durable_id: str
    client: str
    created_ms: int
    model: str
    #: For vLLM: the whole conversation, without what only the gateway reads.
    body: bytes
    previous: str | None = None  # id of the response before
    is_background: bool = False
    #: Whether vLLM writes it as events.
    is_stream: bool = False

    @property
    def id(self) -> str:
        """Its name in OpenAI's API."""
        return PREFIX + self.durable_id

    @property
    def request_id(self) -> str:
        """Its request on the queue, as vLLM numbers the turns of a response."""
        return f"{self.id}_0"


_decoder = msgspec.msgpack.Decoder(StoredResponse)


class ResponseStore:
    """The stored responses of one yard."""

    def __init__(self, queue: YardQueue, ttl_s: int) -> None:
        self._queue = queue
        self.ttl_s = ttl_s

    async def find(self, client: str, response_id: str) -> StoredResponse | None:
        """A client's response, unless it is unknown, deleted or expired."""
        match = _ID.fullmatch(response_id)
        if match is None:
            return None
        run: Any = self._queue.connection
        with translated(self._queue.url):
            packed = await run.get(self._queue.keys.response(client, match[1]))
        return None if packed is None else _decoder.decode(packed)

    async def get(self, client: str, response_id: str) -> StoredResponse:
        """A client's response; raises `GatewayError` where `find` finds none."""
        found = await self.find(client, response_id)
        if found is None:
            raise not_found(response_id)
        return found

    async def open(self, mine: StoredResponse) -> tuple[StoredResponse, bool]:
        """The response under this id, and whether it is new."""
        run: Any = self._queue.connection
        with translated(self._queue.url):
            known = await run.set(self._key(mine), _pack(mine), nx=True, get=True, ex=self.ttl_s)
        return (mine, True) if known is None else (_decoder.decode(known), False)

    async def delete(self, stored: StoredResponse) -> None:
        """Forget a response."""
        run: Any = self._queue.connection
        with translated(self._queue.url):
            await run.delete(self._key(stored))

    async def status(self, stored: StoredResponse) -> str | None:
        """`queued`, `in_progress`, or `over`; None where its request is unknown."""
        run: Any = self._queue.connection
        ledger = self._queue.keys.ledger(stored.client, stored.request_id)
        with translated(self._queue.url):
            state = await run.hget(ledger, "state")
        return None if state is None else _UNFINISHED.get(state.decode(), "over")

    async def cancel(self, stored: StoredResponse) -> Cancelled:
        """Cancel its request, if that is not over."""
        why = "the response was cancelled"
        return await self._queue.cancel(stored.client, stored.request_id, why)

    def _key(self, stored: StoredResponse) -> str:
        return self._queue.keys.response(stored.client, stored.durable_id)


def _pack(stored: StoredResponse) -> bytes:
    return msgspec.msgpack.encode(stored)


def not_found(response_id: str) -> GatewayError:
    """The error for an id that names no response of this client."""
    message = f"Response with id {response_id[:80]!r} not found."
    return GatewayError(404, "invalid_request_error", message, param="response_id")
