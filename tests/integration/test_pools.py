"""Bounded pools of connections: callers wait, and the bound is never exceeded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from tests.support.builders import random_name
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.broker.connection import open_async_connection, open_connection, translated
from tokenyard.protocol.errors import BrokerUnavailable, SettingsError

BOUND, CALLERS, WAIT_S = 5, 20, 60


class Named:
    """A URL whose connections can be identified and counted."""

    def __init__(self, broker: Server, connection: redis.Redis) -> None:
        self.name = random_name("pool")
        self.url = f"{broker.url}?client_name={self.name}"
        self._connection = connection

    def clients(self, *, blocked: bool = False) -> int:
        named = [one for one in self._connection.client_list() if one["name"] == self.name]
        return sum("b" in one["flags"] for one in named) if blocked else len(named)


@pytest.fixture
def named(broker: Server, connection: redis.Redis) -> Named:
    return Named(broker, connection)


@pytest.fixture
def key(connection: redis.Redis) -> Iterator[str]:
    name = random_name("key")
    yield name
    connection.delete(name)


def test_threads_wait_for_one_of_few_connections(
    named: Named, connection: redis.Redis, key: str
) -> None:
    """Given more callers than connections, if all block, I expect few connections to serve all."""
    with (
        open_connection(named.url, timeout_s=WAIT_S, max_connections=BOUND) as pooled,
        ThreadPoolExecutor(CALLERS) as threads,
    ):
        calls = [threads.submit(pooled.blpop, [key], WAIT_S) for _ in range(CALLERS)]
        eventually(lambda: named.clients(blocked=True) == BOUND, timeout_s=WAIT_S)
        assert named.clients() == BOUND

        connection.rpush(key, *range(CALLERS))
        answers = {int(call.result(WAIT_S)[1]) for call in calls}  # type: ignore[index]

        assert answers == set(range(CALLERS))
        assert named.clients() == BOUND


def test_pipelines_and_single_commands_share_the_bound(named: Named) -> None:
    """Given a connection that single commands keep open, I expect a pipeline to get it."""
    with open_connection(named.url, max_connections=1, pool_timeout_s=0) as pooled:
        for _ in range(3):
            assert pooled.ping()
            with pooled.pipeline(transaction=False) as pipeline:
                pipeline.ping()
                assert pipeline.execute() == [True]
        assert named.clients() == 1


def test_tasks_wait_for_one_of_few_connections(
    named: Named, connection: redis.Redis, key: str
) -> None:
    async def scenario() -> None:
        async with open_async_connection(
            named.url, timeout_s=WAIT_S, max_connections=BOUND
        ) as pooled:
            calls = [asyncio.create_task(pooled.blpop([key], WAIT_S)) for _ in range(CALLERS)]
            full = lambda: named.clients(blocked=True) == BOUND  # noqa: E731
            await asyncio.to_thread(eventually, full, timeout_s=WAIT_S)
            assert named.clients() == BOUND

            connection.rpush(key, *range(CALLERS))
            answers: list[Any] = await asyncio.gather(*calls)

            assert {int(value) for _, value in answers} == set(range(CALLERS))
            assert named.clients() == BOUND

    asyncio.run(scenario())


def test_a_cancelled_task_leaves_its_place_to_others(named: Named, key: str) -> None:
    """Given tasks that hold or await all connections, if cancelled, I expect all to be free."""

    async def scenario() -> None:
        async with open_async_connection(
            named.url, timeout_s=WAIT_S, max_connections=BOUND, pool_timeout_s=WAIT_S
        ) as pooled:
            for _ in range(3):
                calls = [asyncio.create_task(pooled.blpop([key], WAIT_S)) for _ in range(CALLERS)]
                full = lambda: named.clients(blocked=True) == BOUND  # noqa: E731
                await asyncio.to_thread(eventually, full, timeout_s=WAIT_S)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
            assert await asyncio.gather(*(pooled.echo("x") for _ in range(CALLERS)))

    asyncio.run(scenario())


def test_a_thread_that_waits_too_long_gets_the_reason(
    named: Named, connection: redis.Redis, key: str
) -> None:
    with (
        open_connection(
            named.url, timeout_s=WAIT_S, max_connections=1, pool_timeout_s=0.05
        ) as pooled,
        ThreadPoolExecutor(1) as threads,
    ):
        call = threads.submit(pooled.blpop, [key], WAIT_S)
        eventually(lambda: named.clients(blocked=True) == 1, timeout_s=WAIT_S)

        with (
            pytest.raises(BrokerUnavailable, match=r"all 1 .*0\.05 s.*max_connections"),
            translated(named.url),
        ):
            pooled.ping()

        connection.rpush(key, "done")
        assert call.result(WAIT_S)
        assert pooled.ping()


def test_a_task_that_waits_too_long_gets_the_reason(
    named: Named, connection: redis.Redis, key: str
) -> None:
    async def scenario() -> None:
        async with open_async_connection(
            named.url, timeout_s=WAIT_S, max_connections=1, pool_timeout_s=0.05
        ) as pooled:
            call = asyncio.create_task(pooled.blpop([key], WAIT_S))
            full = lambda: named.clients(blocked=True) == 1  # noqa: E731
            await asyncio.to_thread(eventually, full, timeout_s=WAIT_S)

            with (
                pytest.raises(BrokerUnavailable, match=r"all 1 .*0\.05 s.*max_connections"),
                translated(named.url),
            ):
                await pooled.ping()

            connection.rpush(key, "done")
            assert await call
            assert await pooled.ping()

    asyncio.run(scenario())


def test_a_failed_connection_returns_its_place() -> None:
    """Given no server, if a caller tries more often than there are places, I expect no wait."""

    async def scenario() -> None:
        async with open_async_connection(
            "redis://127.0.0.1:1", retries=0, max_connections=1, pool_timeout_s=0
        ) as pooled:
            for _ in range(3):
                with pytest.raises(redis.ConnectionError, match="connect"):
                    await pooled.ping()

    asyncio.run(scenario())
    with open_connection(
        "redis://127.0.0.1:1", retries=0, max_connections=1, pool_timeout_s=0
    ) as pooled:
        for _ in range(3):
            with pytest.raises(redis.ConnectionError, match="connect"):
                pooled.ping()


@pytest.mark.parametrize("open_one", [open_connection, open_async_connection])
@pytest.mark.parametrize("options", [{"max_connections": 0}, {"pool_timeout_s": -1.0}])
def test_an_invalid_bound_is_refused(open_one: Any, options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="max_connections must be at least 1"):
        open_one("redis://localhost", **options)


def test_the_url_may_set_the_bound(named: Named) -> None:
    url = f"{named.url}&max_connections=1&timeout=0"
    with open_connection(url) as pooled:
        pool: Any = pooled.connection_pool
        held = pool.get_connection()
        with pytest.raises(redis.exceptions.MaxConnectionsError):
            pooled.ping()
        pool.release(held)
        assert pooled.ping()


def test_a_connection_is_used_by_one_thread_at_a_time(named: Named) -> None:
    """Given threads that take and return quickly, I expect each to get its own answers."""
    together = threading.Barrier(CALLERS)

    def work(number: int) -> bool:
        together.wait(WAIT_S)
        return all(pooled.echo(f"{number}/{at}") == f"{number}/{at}".encode() for at in range(100))

    with (
        open_connection(named.url, max_connections=2, pool_timeout_s=WAIT_S) as pooled,
        ThreadPoolExecutor(CALLERS) as threads,
    ):
        assert all(threads.map(work, range(CALLERS)))
        assert named.clients() == 2
