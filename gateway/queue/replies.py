"""Reads the reply streams of many requests over one connection."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.queue.calls import Command
from tokenyard import clock
from tokenyard.broker.connection import BLOCK_MARGIN_S, open_async_connection, translated
from tokenyard.broker.tasks import BackgroundLoop
from tokenyard.protocol.replies import Reply, decode_replies

log = logging.getLogger("tokenyard.gateway")

#: Longest blocking read.
_BLOCK_MS: Final = 2_000
#: Entries of one stream in one read.
_COUNT: Final = 200
#: Longest time of a blocking read.
_READ_S: Final = _BLOCK_MS / 1000 + BLOCK_MARGIN_S
#: Least time between two reads for each open stream: a read names them all, so that many streams
#: would otherwise cost a core. One that waits costs nothing, and 250 add a millisecond at most.
_PAUSE_S: Final = 4e-6


@dataclass(slots=True, eq=False)
class ReplyStream:
    """The replies to one request, from the first."""

    key: bytes
    last: bytes = b"0-0"  # id of the last entry that it has
    replies: deque[Reply] = field(default_factory=deque)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[Reply]:
        """All replies up to the result."""
        async for reply in self.until(None):
            yield reply

    async def until(self, give_up: float | None) -> AsyncIterator[Reply]:
        """All replies up to the result; raises `TimeoutError` if it has not come by then.

        ``give_up`` is monotonic.
        """
        while True:
            while self.replies:
                reply = self.replies.popleft()
                yield reply
                if reply.event == "result":
                    return
            self.has_news.clear()
            if give_up is None:
                await self.has_news.wait()
            else:
                await asyncio.wait_for(self.has_news.wait(), give_up - clock.monotonic())


class ReplyReader:
    """Follows the reply streams that are open."""

    def __init__(self, url: str, wake_key: str) -> None:
        self._url = url
        self._wake_key = wake_key.encode()
        self._waking: Command = ("XADD", wake_key, "MAXLEN", 1, "*", "w", "1")
        self._wake_cursor = b"$"
        self._open: dict[bytes, list[ReplyStream]] = {}
        self._is_blocked = False
        self._blocking = open_async_connection(url, timeout_s=_READ_S, retries=0)
        self.loop = BackgroundLoop(self._turn, "reading replies", log)

    async def start(self) -> None:
        """Begin to read."""
        run: Any = self._blocking
        with translated(self._url):
            self._wake_cursor = await run.execute_command(*self._waking)
            await run.expire(self._wake_key, 86_400)
        self.loop.start()

    async def stop(self) -> None:
        """End; streams that are open get nothing more."""
        await self.loop.stop(_READ_S)
        await self._blocking.aclose()

    @property
    def count(self) -> int:
        """The number of open streams."""
        return sum(map(len, self._open.values()))

    def follow(self, key: str) -> tuple[ReplyStream, Sequence[Command]]:
        """Read the replies on a stream from its first entry, also beside another reader.

        The caller carries out the commands, which end a read that does not name the stream.
        """
        stream = ReplyStream(key.encode())
        self._open.setdefault(stream.key, []).append(stream)
        if not self._is_blocked:
            return stream, ()
        self._is_blocked = False  # the streams that come meanwhile need no command of their own
        return stream, [self._waking]

    def forget(self, stream: ReplyStream) -> None:
        """Stop reading a stream."""
        if stream in self._open.get(stream.key, ()):
            self._open[stream.key].remove(stream)
            if not self._open[stream.key]:
                del self._open[stream.key]

    async def _turn(self) -> None:
        await self._read_once()
        await clock.pause(len(self._open) * _PAUSE_S)

    async def _read_once(self) -> None:
        asked = {key: _first_last(open_) for key, open_ in self._open.items()}
        streams: dict[Any, Any] = {self._wake_key: self._wake_cursor, **asked}
        run: Any = self._blocking
        self._is_blocked = True
        try:
            with translated(self._url):
                answer = await run.xread(streams, count=_COUNT, block=_BLOCK_MS)
        finally:
            self._is_blocked = False
        # The newest first: a first token is waited for, and who reads a stream does so in turn.
        for key, entries in reversed(answer or ()):
            if key == self._wake_key:
                self._wake_cursor = entries[-1][0]
                continue
            for stream in self._open.get(key, ()):
                _give(stream, entries, asked[key])


def _first_last(streams: list[ReplyStream]) -> bytes:
    """Where to read on: behind the stream that has least."""
    if len(streams) == 1:
        return streams[0].last
    return min((stream.last for stream in streams), key=_order)


def _give(stream: ReplyStream, entries: list[Any], asked: bytes) -> None:
    """Add the entries, read behind ``asked``, that a stream does not have yet."""
    if stream.last != asked:
        last = _order(stream.last)
        if last < _order(asked):
            return  # opened in the meantime: it may lack what is before these entries
        entries = [entry for entry in entries if _order(entry[0]) > last]
    for entry, fields in entries:
        stream.last = entry
        try:
            stream.replies.extend(decode_replies(fields))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("skipped malformed reply %s of %s: %s", entry, stream.key, error)
    stream.has_news.set()


def _order(entry: bytes) -> tuple[int, int]:
    """The two halves of an entry's id."""
    first, _, second = entry.partition(b"-")
    return int(first), int(second)
