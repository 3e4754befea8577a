"""What clients store of OpenAI's Responses API takes no more of Redis than it leaves free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, cast

import pytest
import redis

from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError, invalid
from gateway.http.incoming import BODY, Bodies, ParsedBody
from gateway.http.routes import Call
from gateway.queue.yard import YardQueue
from gateway.responses.store import ResponseStore, StoredResponse
from tests.support.builders import random_name
from tests.support.servers import Server
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.keys import Keys

pytestmark = pytest.mark.timeout(60)
MIB = 1024 * 1024
EVIL, OTHER = "http.evil", "http.other"


def response(client: str, number: int, size: int = MIB, created_ms: int | None = None) -> Any:
    at = 10**13 if created_ms is None else created_ms
    return StoredResponse(f"{number:032x}", client, at, "m", b"x" * size)


def with_store(
    url: str, keys: Keys, work: Callable[[YardQueue], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        queue = YardQueue(url, keys.yard)
        try:
            await work(queue)
        finally:
            await queue.broker.connection.aclose()

    asyncio.run(main())


@pytest.mark.valkey_only
def test_a_client_stores_as_much_as_it_leaves_free(own_broker: Server) -> None:
    keys = Keys(random_name("yard"))
    with redis.Redis.from_url(own_broker.url) as connection:
        used = connection.info("memory")["used_memory"]
        connection.config_set("maxmemory", used + 24 * MIB)

        async def work(queue: YardQueue) -> None:
            store = ResponseStore(queue, 60)
            kept: list[StoredResponse] = []

            async def keep(client: str, numbers: Iterable[int]) -> None:
                for number in numbers:
                    one = response(client, number)
                    await queue.broker.carry_out([await store.reserve(one)])
                    kept.append(one)

            with pytest.raises(GatewayError, match="your stored responses") as refused:
                await keep(EVIL, range(24))
            assert (refused.value.status, refused.value.code) == (429, "QUOTA_EXCEEDED")
            assert 5 < len(kept) < 12
            # Another one finds room, and the first again when it has deleted one, once.
            await keep(OTHER, [1])
            for _ in range(2):
                await store.delete(kept[0])
                await store.delete(kept[1])
            await keep(EVIL, [100, 101])
            with pytest.raises(GatewayError):
                await keep(EVIL, [102, 103])

        with_store(own_broker.url, keys, work)
        sums = connection.hgetall(keys.stored(EVIL))
        assert len(connection.keys(keys.response(EVIL, "*"))) == sum(map(int, sums.values())) // MIB


def test_what_has_expired_does_not_count(
    redis_url: str, connection: redis.Redis, keys: Keys
) -> None:
    async def work(queue: YardQueue) -> None:
        await ResponseStore(queue, 60).reserve(response(EVIL, 1, size=5, created_ms=0))

    with_store(redis_url, keys, work)
    assert connection.hgetall(keys.stored(EVIL)) == {}


class Refusing:
    """A front end that refuses."""

    async def queue_up(self, *_: object) -> None:
        raise invalid("input", "refused")


@pytest.mark.vllm
@pytest.mark.parametrize("size", [10, 2000])
def test_a_refused_request_keeps_nothing(
    redis_url: str, connection: redis.Redis, keys: Keys, size: int
) -> None:
    from gateway.responses.api import ResponsesApi

    settings = GatewaySettings(redis_url=redis_url, max_body_bytes=1000)
    context = RequestContext(durable_id="a" * 32, client=EVIL, created=1e10, is_first=True)

    async def work(queue: YardQueue) -> None:
        nothing = cast("Any", None)
        api = ResponsesApi(settings, queue, nothing, nothing, Bodies(settings))
        api._renderer = cast("Any", Refusing())
        body = {"input": "x" * size, "background": True}
        scope = {"headers": [], BODY: ParsedBody(body, is_small=size < 1000, client=EVIL)}
        with pytest.raises(GatewayError) as refused:
            await api.create(Call(scope, nothing, nothing), "m", context, 0)
        assert (refused.value.status, refused.value.param) == (400, "input")

    with_store(redis_url, keys, work)
    assert connection.keys(keys.response(EVIL, "*")) == []
    assert sum(map(int, connection.hgetall(keys.stored(EVIL)).values())) == 0
    assert context.unsaved == []
