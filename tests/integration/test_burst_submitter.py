"""Submissions of the gateway, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis

from gateway.queue.calls import Command
from gateway.queue.yard import YardQueue
from tests.support.builders import make_request
from tokenyard.protocol.errors import BrokerUnsuitable
from tokenyard.protocol.keys import Keys, PriorityClass
from tokenyard.scripts.answers import Acceptance, Submitted

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def submitting(url: str, keys: Keys) -> AsyncIterator[YardQueue]:
    queue = YardQueue(url, keys.yard)
    await queue.start()
    try:
        yield queue
    finally:
        await queue.stop()


def test_what_comes_with_a_request_is_written_when_it_is_accepted(
    redis_url: str, connection: redis.Redis, keys: Keys
) -> None:
    connection.script_flush()  # as on a new server

    async def submit() -> list[Acceptance]:
        async with submitting(redis_url, keys) as queue:
            return await asyncio.gather(
                *(one(queue, number, name) for number, name in enumerate(("low", "high") * 3))
            )

    async def one(queue: YardQueue, number: int, name: PriorityClass) -> Acceptance:
        record: Command = ("SET", keys.http_record("c", str(number)), number)
        request = make_request(str(number))
        return await queue.submit(request, name, refuse_late=False, before=[record])

    accepted = asyncio.run(submit())

    assert {one.code for one in accepted} == {Submitted.ACCEPTED}
    assert [one.sid.partition("/")[0] for one in accepted] == ["low", "high"] * 3
    found = connection.mget([keys.http_record("c", str(number)) for number in range(6)])
    assert found == [b"%d" % number for number in range(6)]


def test_a_request_is_refused_where_what_comes_with_it_cannot_be_written(
    redis_url: str, connection: redis.Redis, keys: Keys
) -> None:
    connection.rpush(keys.http_record("c", "q"), "a list")

    async def submit() -> None:
        async with submitting(redis_url, keys) as queue:
            wrong: Command = ("INCR", keys.http_record("c", "q"))
            request = make_request("q")
            await queue.submit(request, "normal", refuse_late=False, before=[wrong])

    with pytest.raises(BrokerUnsuitable, match="WRONGTYPE"):
        asyncio.run(submit())
