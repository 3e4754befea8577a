"""Records of requests with keys, on a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from gateway.http.errors import GatewayError
from gateway.http.records import Record, Records
from gateway.queue.yard import YardQueue
from tokenyard.protocol.errors import BrokerUnsuitable
from tokenyard.protocol.keys import Keys

pytestmark = pytest.mark.timeout(60)


def opened(
    url: str, keys: Keys, *asked: tuple[str, str]
) -> list[tuple[Record, bool] | BaseException]:
    """What names with fingerprints find that are asked for at one moment."""

    async def main() -> list[Any]:
        queue = YardQueue(url, keys.yard)
        records = Records(queue)
        try:
            claims = [records.open("c", name, print_, 60) for name, print_ in asked]
            return await asyncio.gather(*claims, return_exceptions=True)
        finally:
            await queue.broker.connection.aclose()

    return asyncio.run(main())


def test_of_requests_at_one_moment_each_has_its_own_record(
    redis_url: str, connection: redis.Redis, keys: Keys
) -> None:
    [claimed] = opened(redis_url, keys, ("old", "p"))
    assert not isinstance(claimed, BaseException)
    earlier, _ = claimed
    before = connection.info("commandstats")["cmdstat_set"]["calls"]

    first, again, other, wrong, old = opened(
        redis_url, keys, ("new", "p"), ("new", "p"), ("other", "p"), ("new", "q"), ("old", "p")
    )

    assert not isinstance(first, BaseException)
    assert not isinstance(other, BaseException)
    assert (again, old) == ((first[0], False), (earlier, False))
    assert (first[0].durable_id, first[1]) == ("new", True)
    assert (other[0].durable_id, other[1]) == ("other", True)
    assert isinstance(wrong, GatewayError)
    assert wrong.status == 422
    assert connection.info("commandstats")["cmdstat_set"]["calls"] == before + 5
    assert 0 < connection.ttl(keys.http_record("c", "new")) <= 60


def test_a_record_that_cannot_be_written_is_an_error(
    redis_url: str, connection: redis.Redis, keys: Keys
) -> None:
    connection.rpush(keys.http_record("c", "list"), "a list")
    [refused] = opened(redis_url, keys, ("list", "p"))
    assert isinstance(refused, BrokerUnsuitable)
