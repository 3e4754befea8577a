"""The gateway's reader of reply streams, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import redis

from gateway.queue.calls import carry_out
from gateway.queue.replies import ReplyReader, ReplyStream
from tests.support.builders import random_name
from tokenyard.broker.connection import open_async_connection
from tokenyard.protocol.wire import pack_tokens

pytestmark = pytest.mark.timeout(60)


class Written:
    """A reply stream as workers write it."""

    def __init__(self, connection: redis.Redis) -> None:
        self.key = random_name("replies")
        self._connection = connection
        self._count = 0

    def add(self, tokens: int, *, ends: bool = False) -> None:
        """So many deltas of a token each, then the result."""
        for _ in range(tokens):
            self._write({"event": "delta"})
        if ends:
            self._write({"event": "result", "status": "completed"})

    def _write(self, fields: dict[str, str]) -> None:
        entry = {"id": "one", "seq": self._count, "tokens": pack_tokens([self._count]), **fields}
        self._connection.xadd(self.key, entry)
        self._count += 1


class Following:
    """A reader, and a connection for the commands that it hands out."""

    def __init__(self, url: str) -> None:
        self.reader = ReplyReader(url, random_name("wake"))
        self.connection = open_async_connection(url)

    async def follow(self, key: str) -> ReplyStream:
        """See `ReplyReader.follow`."""
        stream, waking = self.reader.follow(key)
        await carry_out(self.connection, waking)
        return stream


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Following]:
    following = Following(url)
    await following.reader.start()
    try:
        yield following
    finally:
        await following.reader.stop()
        await following.connection.aclose()


async def seqs(stream: ReplyStream, most: int | None = None) -> list[int]:
    """Positions of the replies, up to the result or so many."""
    found: list[int] = []
    async for reply in stream:
        found.append(reply.seq)
        if len(found) == most:
            break
    return found


@pytest.fixture
def run(redis_url: str) -> Callable[[Callable[[Following], Awaitable[None]]], None]:
    async def read(scene: Callable[[Following], Awaitable[None]]) -> None:
        async with asyncio.timeout(50), reading(redis_url) as rig:
            await scene(rig)

    return lambda scene: asyncio.run(read(scene))


def test_a_second_reader_of_the_same_replies_gets_all_from_the_first(
    run: Callable[[Callable[[Following], Awaitable[None]]], None], connection: redis.Redis
) -> None:
    written = Written(connection)

    async def scene(rig: Following) -> None:
        written.add(3)
        first = await rig.follow(written.key)
        assert await seqs(first, 3) == [0, 1, 2]
        second = await rig.follow(written.key)
        assert await seqs(second, 3) == [0, 1, 2]
        written.add(2, ends=True)
        assert await asyncio.gather(seqs(first), seqs(second)) == [[3, 4, 5]] * 2

    run(scene)


def test_streams_that_are_opened_together_are_read_without_waiting_for_each_other(
    run: Callable[[Callable[[Following], Awaitable[None]]], None], connection: redis.Redis
) -> None:
    several = [Written(connection) for _ in range(50)]

    async def scene(rig: Following) -> None:
        streams = await asyncio.gather(*(rig.follow(one.key) for one in several))
        for one in several:
            one.add(2, ends=True)
        assert await asyncio.gather(*map(seqs, streams)) == [[0, 1, 2]] * 50
        for stream in streams:
            rig.reader.forget(stream)
        assert rig.reader.count == 0

    run(scene)


def test_a_new_stream_ends_the_wait_of_a_read_that_does_not_name_it(
    run: Callable[[Callable[[Following], Awaitable[None]]], None], connection: redis.Redis
) -> None:
    quiet, later = Written(connection), Written(connection)
    later.add(1, ends=True)

    async def scene(rig: Following) -> None:
        await rig.follow(quiet.key)
        for _ in range(20):
            began = asyncio.get_running_loop().time()
            assert await seqs(await rig.follow(later.key)) == [0, 1]
            assert asyncio.get_running_loop().time() - began < 1.5  # a read waits for 2 s

    run(scene)


def test_of_what_comes_together_the_newest_stream_is_read_first(
    run: Callable[[Callable[[Following], Awaitable[None]]], None], connection: redis.Redis
) -> None:
    several = [Written(connection) for _ in range(3)]
    for one in several:
        one.add(1)
    order: list[bytes] = []

    async def scene(rig: Following) -> None:
        async def first(stream: ReplyStream) -> None:
            await seqs(stream, 1)
            order.append(stream.key)

        followed = [rig.reader.follow(one.key) for one in several]
        waiting = asyncio.gather(*(first(stream) for stream, _ in followed))
        await carry_out(rig.connection, [command for _, waking in followed for command in waking])
        await waiting

    run(scene)

    assert order == [one.key.encode() for one in reversed(several)]
