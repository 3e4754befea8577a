"""Reads the reply streams of many requests over one connection."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tokenyard.broker.connection import BLOCK_MARGIN_S, open_async_connection, translated
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.replies import Reply, decode_replies

log = logging.getLogger("tokenyard.gateway")

#: Longest blocking read.
_BLOCK_MS: Final = 2_000
#: Entries of one stream in one read.
_COUNT: Final = 200
_BACKOFF_S: Final = 0.5


#: The two halves of an entry's id.
Cursor = tuple[int, int]


@dataclass(slots=True, eq=False)
class ReplyStream:
    """The replies to one request, from the first."""

    key: str
    cursor: Cursor = (0, 0)  # the last entry that it has
    replies: deque[Reply] = field(default_factory=deque)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[Reply]:
        """All replies up to the result."""
        while True:
            while self.replies:
                reply = self.replies.popleft()
                yield reply
                if reply.event == "result":
                    return
            self.has_news.clear()
            await self.has_news.wait()


class ReplyReader:
    """Follows the reply streams that are open."""

    def __init__(self, url: str, wake_key: str) -> None:
        self._url = url
        self._wake_key = wake_key
        self._wake_cursor = "$"
        self._open: dict[bytes, list[ReplyStream]] = {}
        self._is_blocked = False
        self._connection = open_async_connection(url)
        self._blocking = open_async_connection(
            url, timeout_s=_BLOCK_MS / 1000 + BLOCK_MARGIN_S, retries=0
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to read."""
        run: Any = self._connection
        with translated(self._url):
            entry = await run.xadd(self._wake_key, {"w": "1"}, maxlen=1)
            await run.expire(self._wake_key, 86_400)
        self._wake_cursor = entry.decode()
        self._task = asyncio.create_task(self._run(), name="gateway-replies")

    async def stop(self) -> None:
        """End; streams that are open get nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._connection.aclose()
        await self._blocking.aclose()

    @property
    def count(self) -> int:
        """The number of open streams."""
        return sum(map(len, self._open.values()))

    async def follow(self, key: str) -> ReplyStream:
        """Read the replies on a stream from its first entry, also beside another reader."""
        stream = ReplyStream(key)
        self._open.setdefault(key.encode(), []).append(stream)
        if self._is_blocked:
            run: Any = self._connection
            with translated(self._url):
                await run.xadd(self._wake_key, {"w": "1"}, maxlen=1)
        return stream

    def forget(self, stream: ReplyStream) -> None:
        """Stop reading a stream."""
        key = stream.key.encode()
        if stream in self._open.get(key, ()):
            self._open[key].remove(stream)
            if not self._open[key]:
                del self._open[key]

    async def _run(self) -> None:
        while True:
            try:
                await self._read_once()
            except TokenyardError as error:
                log.warning("cannot read replies: %s; trying again", error)
                await asyncio.sleep(_BACKOFF_S)

    async def _read_once(self) -> None:
        behind = {key: min(one.cursor for one in open_) for key, open_ in self._open.items()}
        streams: dict[Any, Any] = {self._wake_key: self._wake_cursor}
        streams.update((key, f"{first}-{second}") for key, (first, second) in behind.items())
        run: Any = self._blocking
        self._is_blocked = True
        try:
            with translated(self._url):
                answer = await run.xread(streams, count=_COUNT, block=_BLOCK_MS)
        finally:
            self._is_blocked = False
        for key, entries in answer or ():
            if key.decode() == self._wake_key:
                self._wake_cursor = entries[-1][0].decode()
                continue
            for stream in self._open.get(key, ()):
                # One that was opened in the meantime may lack what is before these entries.
                if stream.cursor >= behind[key]:
                    _give(stream, entries)


def _give(stream: ReplyStream, entries: list[Any]) -> None:
    """Add the entries that a stream does not have yet."""
    for entry, fields in entries:
        cursor = _cursor_of(entry)
        if cursor <= stream.cursor:
            continue
        stream.cursor = cursor
        try:
            stream.replies.extend(decode_replies(fields))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("skipped malformed reply %s of %s: %s", entry, stream.key, error)
    stream.has_news.set()


def _cursor_of(entry: bytes) -> Cursor:
    first, _, second = entry.partition(b"-")
    return int(first), int(second)
