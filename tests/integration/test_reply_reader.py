"""The gateway's reader of replies, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import redis

from gateway.queue.calls import Broker
from gateway.queue.replies import ReplyReader, ReplyStream
from tests.support.builders import random_name
from tests.support.waiting import eventually
from tokenyard.broker.connection import open_async_connection
from tokenyard.protocol.errors import UnknownRequest
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Reply, encode_reply
from tokenyard.protocol.wire import pack_tokens

pytestmark = pytest.mark.timeout(60)


class Rig:
    """A reader, and what workers write for it."""

    def __init__(self, url: str, connection: redis.Redis) -> None:
        self.keys = Keys(random_name("yard"))
        self.connection = connection
        self.own = open_async_connection(url)
        self.reader = ReplyReader(Broker(self.own, url, self.keys), "gateway")

    def follow(self, request_id: str, *, is_elsewhere: bool = False) -> ReplyStream:
        """A request of token ids."""
        return self.reader.follow("http", request_id, is_whole=False, is_elsewhere=is_elsewhere)

    def publish(self, *replies: Reply) -> None:
        """A frame on the reader's stream."""
        packed = b"".join(map(encode_reply, replies))
        frame = b"\xdd" + len(replies).to_bytes(4, "big") + packed
        self.connection.xadd(f"{self.keys.prefix}{self.reader.reply_to}", {"frame": frame})

    def keep(self, request_id: str, tokens: int, result: Reply | None = None) -> None:
        """The ledger of a request with so many tokens, or its result."""
        ledger = {"state": result.status if result and result.status else "assigned"}
        self.connection.hset(self.keys.ledger("http", request_id), mapping=dict(ledger))
        published = pack_tokens(range(tokens))
        self.connection.set(self.keys.tokens("http", request_id), published)
        if result is not None:
            packed = encode_reply(result)
            self.connection.hset(self.keys.ledger("http", request_id), "result", packed)


def delta(request_id: str, seq: int) -> Reply:
    return Reply(id=request_id, event="delta", seq=seq, tokens=pack_tokens([seq]))


def result(request_id: str, tokens: int) -> Reply:
    made = pack_tokens(range(tokens))
    return Reply(id=request_id, event="result", seq=tokens, tokens=made, status="completed")


Scene = Callable[[Rig], Awaitable[None]]


@pytest.fixture
def run(redis_url: str, connection: redis.Redis) -> Callable[[Scene], None]:
    @asynccontextmanager
    async def reading() -> AsyncIterator[Rig]:
        rig = Rig(redis_url, connection)
        await rig.reader.start()
        try:
            yield rig
        finally:
            await rig.reader.stop()
            await rig.own.aclose()

    async def play(scene: Scene) -> None:
        async with asyncio.timeout(50), reading() as rig:
            await scene(rig)

    return lambda scene: asyncio.run(play(scene))


async def seqs(stream: ReplyStream, most: int | None = None) -> list[int]:
    """Positions of the replies, up to the result or so many."""
    found: list[int] = []
    async for reply in stream.until(None):
        found.append(reply.seq)
        if len(found) == most:
            break
    return found


def test_each_request_gets_its_part_of_the_frames(run: Callable[[Scene], None]) -> None:
    names = [f"r{number}" for number in range(50)]

    async def scene(rig: Rig) -> None:
        streams = [rig.follow(name) for name in names]
        rig.publish(*(delta(name, 0) for name in names))
        rig.publish(*(delta(name, 1) for name in names), delta("whose?", 0))
        rig.publish(*(result(name, 3) for name in names))
        # Each token once, whatever is cut behind: the result says how many came before it.
        assert await asyncio.gather(*map(seqs, streams)) == [[0, 1, 3]] * 50
        for stream in streams:
            rig.reader.forget(stream)
        assert not rig.reader._streams

    run(scene)


def test_a_request_that_was_submitted_before_is_read_from_its_ledger(
    run: Callable[[Scene], None],
) -> None:
    async def scene(rig: Rig) -> None:
        rig.keep("one", 2)
        stream = rig.follow("one", is_elsewhere=True)
        await rig.reader.look_at([stream])
        assert await seqs(stream, 1) == [0]
        rig.keep("one", 5)
        assert await seqs(stream, 1) == [2]
        rig.keep("one", 6, result("one", 6))
        assert await seqs(stream) == [6]

    run(scene)


def test_a_second_reader_of_the_same_request_gets_all_from_the_first(
    run: Callable[[Scene], None],
) -> None:
    async def scene(rig: Rig) -> None:
        rig.keep("one", 1)
        first, second = rig.follow("one"), rig.follow("one")
        await rig.reader.accepted(second, is_new=True)
        rig.publish(delta("one", 0))
        assert [await seqs(first, 1), await seqs(second, 1)] == [[0], [0]]
        rig.keep("one", 2, result("one", 2))
        rig.publish(result("one", 2))
        assert [await seqs(first), await seqs(second)] == [[2], [2]]

    run(scene)


def test_a_second_reader_is_told_nothing_before_its_request_is_accepted(
    run: Callable[[Scene], None],
) -> None:
    async def scene(rig: Rig) -> None:
        rig.follow("one")
        second = rig.follow("one")
        await rig.reader._look_again()  # the ledger is not there yet
        rig.keep("one", 1)
        await rig.reader.accepted(second, is_new=False)
        assert await seqs(second, 1) == [0]

    run(scene)


def test_a_hole_in_the_frames_is_filled_from_the_ledger(run: Callable[[Scene], None]) -> None:
    async def scene(rig: Rig) -> None:
        stream = rig.follow("one")
        rig.publish(delta("one", 0))
        assert await seqs(stream, 1) == [0]
        rig.keep("one", 4)
        rig.publish(delta("one", 3))  # those of 1 and 2 were trimmed
        assert await seqs(stream, 1) == [1]
        rig.publish(delta("one", 4), result("one", 5))
        assert await seqs(stream) == [4, 5]

    run(scene)


def test_what_the_ledger_does_not_know_is_an_error(run: Callable[[Scene], None]) -> None:
    async def scene(rig: Rig) -> None:
        with pytest.raises(UnknownRequest):
            await seqs(rig.follow("nobody", is_elsewhere=True))

    run(scene)


def test_frames_that_were_read_are_deleted(run: Callable[[Scene], None]) -> None:
    async def scene(rig: Rig) -> None:
        stream = rig.follow("one")
        for seq in range(501):
            rig.publish(delta("one", seq))
        rig.publish(result("one", 501))
        await seqs(stream)
        key = f"{rig.keys.prefix}{rig.reader.reply_to}"
        assert await asyncio.to_thread(eventually, lambda: not rig.connection.xlen(key))

    run(scene)


def test_of_what_comes_together_the_newest_request_is_read_first(
    run: Callable[[Scene], None],
) -> None:
    names, order = ["a", "b", "c"], list[str]()

    async def scene(rig: Rig) -> None:
        async def first(stream: ReplyStream) -> None:
            await seqs(stream, 1)
            order.append(stream.pending.id)

        reading = asyncio.gather(*(first(rig.follow(name)) for name in names))
        rig.publish(*(delta(name, 0) for name in names))
        await reading

    run(scene)

    assert order == names[::-1]
