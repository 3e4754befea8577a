"""What the yard remembers of HTTP requests, so that any gateway can take one up again."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.http.errors import GatewayError
from gateway.queue.calls import Bursts, Command
from gateway.queue.yard import YardQueue
from tokenyard import clock
from tokenyard.broker.connection import translated
from tokenyard.protocol.errors import TokenyardError

#: Longest key that a client may choose.
MAX_KEY: Final = 255


class Record(Struct, frozen=True):
    """An HTTP request under its durable id."""

    durable_id: str
    fingerprint: str  # of path and body
    created_ms: int  # unix time of its first arrival


_decoder = msgspec.msgpack.Decoder(Record)


def durable_id(client: str, key: str | None) -> str:
    """32 hex digits: from the client's idempotency key, else drawn."""
    if key is None:
        return secrets.token_hex(16)
    if not 1 <= len(key) <= MAX_KEY or not key.isprintable():
        message = f"Idempotency-Key: give 1 to {MAX_KEY} printable characters"
        raise GatewayError(400, message, param="Idempotency-Key")
    return blake2b(f"{client}/{key}".encode(), digest_size=16).hexdigest()


def fingerprint(path: str, body: dict[str, Any]) -> str:
    """Identifies equal requests; the order of keys does not matter."""
    packed = msgspec.json.encode([path, body], order="sorted")
    return blake2b(packed, digest_size=16).hexdigest()


class Records:
    """The records of one yard."""

    def __init__(self, queue: YardQueue) -> None:
        self._queue = queue
        self._claims = Bursts(self._claim)

    async def open(self, client: str, name: str, print_: str, ttl_s: int) -> tuple[Record, bool]:
        """The record of a request, and whether it was made now, for ``ttl_s``: there was none.

        It must not outlive the answer: the request would run once more under the same id. Raises
        `GatewayError` where the id belongs to another request.
        """
        mine = Record(name, print_, clock.wall_ms())
        known = await self._claims.ask((self._queue.keys.http_record(client, name), mine, ttl_s))
        return (mine, True) if known is None else (_checked(known, print_), False)

    async def forget(self, client: str, name: str) -> None:
        """Forget a request that was refused: its name may be used again, for another one."""
        with contextlib.suppress(TokenyardError):
            await self._queue.broker.command("DEL", self._queue.keys.http_record(client, name))

    async def _claim(self, asked: Sequence[tuple[str, Record, int]]) -> list[bytes | None]:
        """Write records where there are none; what was there."""
        run: Any = self._queue.broker.connection
        with translated(self._queue.broker.url):
            async with run.pipeline(transaction=False) as pipeline:
                for key, record, ttl_s in asked:
                    packed = msgspec.msgpack.encode(record)
                    pipeline.set(key, packed, nx=True, get=True, ex=ttl_s)
                found: list[bytes | None] = await pipeline.execute()
        return found

    def begin(self, client: str, name: str, print_: str, ttl_s: int) -> tuple[Record, Command]:
        """The record of a request whose id was drawn, and the command that writes it.

        Nobody else knows the id, so that this can wait until the request is submitted.
        """
        mine = Record(name, print_, clock.wall_ms())
        key = self._queue.keys.http_record(client, name)
        return mine, ("SET", key, msgspec.msgpack.encode(mine), "EX", ttl_s)

    async def find(self, client: str, name: str, print_: str) -> Record:
        """The record of a request that is taken up again; raises `GatewayError`."""
        known = await self._queue.broker.command("GET", self._queue.keys.http_record(client, name))
        if known is None:
            message = "Last-Event-ID: this event is no longer known; ask again from the start"
            raise GatewayError(404, message, code="event_not_found")
        return _checked(known, print_)


def _checked(packed: bytes, print_: str) -> Record:
    record = _decoder.decode(packed)
    if record.fingerprint != print_:
        raise key_reused()
    return record


def key_reused() -> GatewayError:
    """The refusal of a key that came with another body before."""
    return GatewayError(
        422,
        "this idempotency key was used with another body; take a new key",
        param="Idempotency-Key",
        code="idempotency_key_reused",
    )
