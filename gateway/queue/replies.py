"""Reads the replies to all requests of one gateway, in frames from one stream of its own.

A request that was submitted before is answered where it was asked for then: it is read from its
ledger, which has its tokens so far, and its result when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.queue.calls import Broker, Command
from tokenyard import clock
from tokenyard.broker.connection import BLOCK_MARGIN_S, open_async_connection, translated
from tokenyard.broker.tasks import BackgroundLoop
from tokenyard.client.ledger import read_snapshots, snapshot_commands
from tokenyard.client.pending import PendingRequest
from tokenyard.client.router import ReplyRouter, read_entries
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.replies import Reply

log = logging.getLogger("tokenyard.gateway")

#: Longest blocking read.
_BLOCK_MS: Final = 2_000
#: Frames in one read.
_COUNT: Final = 200
#: Longest time of a blocking read.
_READ_S: Final = _BLOCK_MS / 1000 + BLOCK_MARGIN_S
#: Time between two looks at ledgers, and the most requests of one look.
_LOOK_S: Final = 0.1
#: The same while no request is answered elsewhere, for gaps and silence.
_IDLE_S: Final = 0.5
_MOST_LOOKS: Final = 500


@dataclass(slots=True, eq=False)
class ReplyStream:
    """The replies to one request, from the first."""

    client: str
    pending: PendingRequest
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, give_up: float | None) -> AsyncIterator[Reply]:
        """All replies up to the result; raises `TimeoutError` if it has not come by then.

        ``give_up`` is monotonic. Raises the error of a request that has no result.
        """
        pending = self.pending
        while True:
            self.has_news.clear()
            for reply in self.take():
                yield reply
            if pending.deltas:
                continue
            if pending.error is not None:
                raise pending.error
            if pending.final is not None:
                yield pending.final
                return
            left_s = None if give_up is None else give_up - clock.monotonic()
            await asyncio.wait_for(self.has_news.wait(), left_s)

    def take(self) -> Sequence[Reply]:
        """The deltas since the last call, which nobody needs again."""
        deltas, self.pending.deltas = self.pending.deltas, ()
        return deltas


def wake(streams: Sequence[ReplyStream]) -> None:
    """Wake the readers, the newest first: a first token is waited for, and they take turns."""
    for stream in reversed(streams):
        stream.has_news.set()


class ReplyReader:
    """Follows the requests that are open."""

    def __init__(self, broker: Broker, name: str) -> None:
        """``name`` begins the name of its stream, which nobody else can guess."""
        #: Told which streams have news, after each read.
        self.tell: Callable[[Sequence[ReplyStream]], None] = wake
        self.reply_to = f"replies:{name}.{secrets.token_hex(16)}"
        self._broker = broker
        self._key = f"{broker.keys.prefix}{self.reply_to}"
        self._router = ReplyRouter(clock.monotonic())
        self._router.catch_up()
        self._streams: dict[PendingRequest, ReplyStream] = {}
        #: Those that are answered elsewhere, the one that was looked at longest ago first.
        self._elsewhere: dict[PendingRequest, None] = {}
        self._is_behind = False
        self._news: list[ReplyStream] = []
        self._blocking = open_async_connection(broker.url, timeout_s=_READ_S, retries=0)
        self.loop = BackgroundLoop(self._read, "reading replies", log)
        self._looking = BackgroundLoop(self._look_again, "reading ledgers", log)

    async def start(self) -> None:
        """Begin to read."""
        self.loop.start()
        self._looking.start()

    async def stop(self) -> None:
        """End, and delete the frames that were read; streams that are open get nothing more."""
        await self._looking.stop()
        await self.loop.stop(_READ_S)
        await self._blocking.aclose()
        trimmed = self._router.trim_rest(clock.monotonic())
        if trimmed is not None:
            with contextlib.suppress(TokenyardError):
                await self._broker.command("XTRIM", self._key, "MINID", trimmed)

    def follow(
        self, client: str, request_id: str, *, is_whole: bool, is_elsewhere: bool
    ) -> ReplyStream:
        """Follow a request from its first reply.

        ``is_elsewhere``: it was submitted before. Its ledger has its tokens only; ``is_whole``
        waits for the result where that is not enough.
        """
        now = clock.monotonic()
        if is_elsewhere or self._router.find(request_id):
            pending = PendingRequest(request_id, None, now)
        else:
            pending = self._router.open(request_id, None, now)
        pending.is_interleaved = is_whole
        stream = self._streams[pending] = ReplyStream(client, pending)
        pending.listeners.append(lambda _: self._news.append(stream))
        if is_elsewhere:
            self._follow_ledger(pending)
        return stream

    def _follow_ledger(self, pending: PendingRequest) -> None:
        """Only of a request that was submitted: a missing ledger means that it has expired."""
        pending.is_submitted = pending.needs_tokens = True
        self._elsewhere[pending] = None

    async def accepted(self, stream: ReplyStream, *, is_new: bool) -> None:
        """The queue has the request; one that is not new is answered elsewhere, as seen at once."""
        pending = stream.pending
        pending.is_submitted = True
        # Frames go to the one that asked first, which may not be the one that was new.
        if not is_new or self._router.find(pending.id) is not pending:
            self._follow_ledger(pending)
            await self.look_at([stream])

    def forget(self, stream: ReplyStream) -> None:
        """Stop following a request."""
        pending = stream.pending
        del self._streams[pending]
        self._elsewhere.pop(pending, None)
        if self._router.find(pending.id) is pending:
            self._router.forget([pending], TokenyardError("nobody reads it any more"))

    def _tell(self) -> None:
        news, self._news = self._news, []
        if news:
            self.tell(news)

    async def _read(self) -> None:
        streams: dict[Any, Any] = {self._key: self._router.cursor}
        run: Any = self._blocking
        with translated(self._broker.url):
            answer = await run.xread(streams, count=_COUNT, block=_BLOCK_MS)
        entries = read_entries(answer)
        self._is_behind = len(entries) == _COUNT
        self._router.take(entries, clock.monotonic())
        self._tell()

    async def _look_again(self) -> None:
        await clock.pause(_LOOK_S if self._elsewhere else _IDLE_S)
        now = clock.monotonic()
        for pending in list(itertools.islice(self._elsewhere, _MOST_LOOKS)):
            pending.needs_tokens = True
            self._elsewhere[pending] = self._elsewhere.pop(pending)  # to the end
        asked = {one: None for one in self._elsewhere if one.needs_tokens}
        asked |= dict.fromkeys(self._router.due(now, is_behind=self._is_behind))
        await self.look_at([self._streams[one] for one in asked if one in self._streams])

    async def look_at(self, streams: list[ReplyStream]) -> None:
        """Bring requests up to date from their ledgers, and delete the frames that were read."""
        commands: list[Command] = []
        for one in streams:
            commands += snapshot_commands(self._broker.keys, one.client, [one.pending.id])
        trimmed = self._router.trim_from(clock.monotonic())
        if trimmed is not None:
            commands.append(("XTRIM", self._key, "MINID", trimmed))
        if not commands:
            return
        answers = await self._broker.carry_out(commands)
        snapshots = read_snapshots(answers[: 2 * len(streams)])
        self._router.settle([one.pending for one in streams], snapshots)
        self._tell()
