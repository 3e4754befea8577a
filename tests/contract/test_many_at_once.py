"""A client with more concurrent calls than connections."""

from __future__ import annotations

import asyncio

import redis

from tests.contract.conftest import WAIT_S
from tests.contract.stand_in import StandIn
from tests.support.builders import random_name
from tokenyard import AsyncClient
from tokenyard.broker.pools import DEFAULT_MAX_CONNECTIONS
from tokenyard.scripts import Scripts

TASKS = 500
#: The pool, and the connection that reads replies.
MOST = DEFAULT_MAX_CONNECTIONS + 1


def connections(connection: redis.Redis, name: str) -> int:
    return sum(one["name"] == name for one in connection.client_list())


def test_many_tasks_submit_and_await_their_results_concurrently(
    redis_url: str, yard: StandIn, connection: redis.Redis, scripts: Scripts
) -> None:
    name = random_name("crowd")
    url = f"{redis_url}?client_name={name}"

    async def scenario() -> list[str]:
        async with AsyncClient(url, scripts.keys.yard, result_timeout_s=WAIT_S) as client:
            handles = await asyncio.gather(*(client.submit([1, at]) for at in range(TASKS)))
            assert len({handle.id for handle in handles}) == TASKS
            assert 1 < connections(connection, name) <= MOST
            assert connection.xlen(scripts.keys.intake("normal")) == TASKS
            waits = [asyncio.create_task(handle.result()) for handle in handles]
            await asyncio.to_thread(yard.answer_all)
            return [result.status for result in await asyncio.gather(*waits)]

    assert asyncio.run(scenario()) == ["completed"] * TASKS
