"""Responses that clients can ask for again, on any gateway."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Struct

from gateway.http.errors import GatewayError
from gateway.queue.calls import Command
from gateway.queue.yard import YardQueue
from tokenyard import clock
from tokenyard.protocol.errors import Code
from tokenyard.scripts.answers import Cancelled

#: What the id of a response has in front of its durable id.
PREFIX: Final = "resp_"
_ID: Final = re.compile(PREFIX + "([0-9a-f]{32})")
#: Bytes are summed up by the hour in which their requests came, and then expire together.
_HOUR_MS: Final = 3_600_000
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
        packed = await self._queue.broker.command(
            "GET", self._queue.keys.response(client, match[1])
        )
        return None if packed is None else _decoder.decode(packed)

    async def get(self, client: str, response_id: str) -> StoredResponse:
        """A client's response; raises `GatewayError` where `find` finds none."""
        found = await self.find(client, response_id)
        if found is None:
            raise not_found(response_id)
        return found

    async def reserve(self, mine: StoredResponse) -> Command:
        """Count a new response for its client; the command that stores it.

        Raises `GatewayError` where the client would have more of the broker's memory for its
        responses than it leaves free, so that nobody fills it.
        """
        own, free = await self._count(mine, 1)
        if own > free:
            await self._count(mine, -1)
            raise GatewayError(
                429,
                "your stored responses take as much memory as the broker has left; delete some, or "
                "send `store: false`",
                code=Code.QUOTA_EXCEEDED,
            )
        return ("SET", self._key(mine), _pack(mine), "EX", self.ttl_s)

    async def delete(self, stored: StoredResponse, *, is_counted: bool = False) -> None:
        """Forget a response, which may be counted and not stored yet."""
        if await self._queue.broker.command("DEL", self._key(stored)) or is_counted:
            await self._count(stored, -1)

    async def _count(self, stored: StoredResponse, sign: int) -> tuple[int, int]:
        """Count its bytes; those of all responses of its client, and the broker's free ones."""
        sums = self._queue.keys.stored(stored.client)
        change = sign * len(_pack(stored))
        commands: list[Command] = [
            ("HINCRBY", sums, stored.created_ms // _HOUR_MS, change),
            ("EXPIRE", sums, self.ttl_s + _HOUR_MS // 1000),
            ("HGETALL", sums),
            ("INFO", "memory"),
        ]
        *_, by_hour, memory = await self._queue.broker.carry_out(commands)
        first = (clock.wall_ms() - self.ttl_s * 1000) // _HOUR_MS
        over = [hour for hour in by_hour if int(hour) < first]
        if over:
            await self._queue.broker.command("HDEL", sums, *over)
        most = int(memory.get("maxmemory") or memory["total_system_memory"])
        own = sum(int(size) for hour, size in by_hour.items() if hour not in over)
        return own, most - int(memory["used_memory"])

    async def status(self, stored: StoredResponse) -> str | None:
        """`queued`, `in_progress`, or `over`; None where its request is unknown."""
        ledger = self._queue.keys.ledger(stored.client, stored.request_id)
        state = await self._queue.broker.command("HGET", ledger, "state")
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
    return GatewayError(404, message, param="response_id", kind="invalid_request_error")
