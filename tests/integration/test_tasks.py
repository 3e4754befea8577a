"""Requests that pool, through a yard whose workers are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.support.numbers import numbers_of
from tests.support.processes import Plant
from tokenyard import AsyncClient, Client, InvalidRequest, RequestFailed, Result
from tokenyard.protocol.keys import Keys

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def plant(redis_url: str, keys: Keys) -> Any:
    with Plant(redis_url, keys.yard) as plant:
        plant.up(slots=2)
        yield plant


def client_of(plant: Plant) -> Client:
    return Client(plant.url, plant.keys.yard, result_timeout_s=60.0)


def test_one_input_and_several(plant: Plant) -> None:
    with client_of(plant) as client:
        one = client.submit("a text", task="embed").result()
        several = client.submit(["a text", "another", [5, 6]], task="embed").result()
        rendered = client.submit([{"role": "user", "content": "a"}], task="classify").result()

    [alone] = numbers_of(one)
    first, second, ids = numbers_of(several)
    assert one.shapes == [[8]]
    assert first == alone
    assert second != first != ids
    assert one.usage is not None
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len("a text"), 0)
    assert several.input_tokens == [len("a text"), len("another"), 2]
    assert one.provenance is not None
    assert one.provenance.engine == "simulated"
    assert rendered.shapes == [[2]]
    assert (one.tokens, one.text) == ([], None)


def test_what_cannot_run(plant: Plant) -> None:
    with client_of(plant) as client:
        with pytest.raises(RequestFailed, match="sim does generate, embed, classify, not score"):
            client.submit(["a"], task="score", query="q").result()
        with pytest.raises(InvalidRequest, match="inputs: go with one of the tasks"):
            client.submit(["a", "b"])
        with pytest.raises(InvalidRequest, match="stream: the task embed"):
            client.submit("a", task="embed", stream=True)
        with pytest.raises(InvalidRequest, match="max_tokens: is for the task generate"):
            client.submit("a", task="embed", max_tokens=4)
        long = client.submit(["a", "b" * 9000], task="embed").result()
    assert long.shapes == [[8], None]
    assert long.errors is not None
    assert long.errors[1].message.startswith("inputs[1]: has 9000 tokens")


def test_a_map_shares_requests_and_gives_each_item_its_result(
    plant: Plant, connection: redis.Redis
) -> None:
    items: list[Any] = [f"row {number}" for number in range(1000)]
    items[7], items[500], items[600] = "", {"prompt": "row", "id": "own"}, [3, 4]
    with client_of(plant) as client:
        found = dict(client.map(items, task="embed"))
        ordered = [index for index, _ in client.map(items[:300], ordered=True, task="embed")]

    assert sorted(found) == list(range(1000))
    assert ordered == list(range(300))
    failed = [index for index, result in found.items() if not result.ok]
    assert failed == [7]
    assert found[7].error is not None
    assert found[7].error.message == "prompt: is empty"
    with client_of(plant) as client:
        for index in (0, 6, 8, 499, 600, 999):
            alone = client.submit(items[index], task="embed").result()
            assert numbers_of(found[index]) == numbers_of(alone)
    assert found[500].id == "own"
    requests = len(list(connection.scan_iter(f"tokenyard:{{{plant.keys.yard}}}:request:*")))
    assert requests < 40


def test_an_async_map(plant: Plant) -> None:
    async def scenario() -> dict[int, Result]:
        async with AsyncClient(plant.url, plant.keys.yard, result_timeout_s=60.0) as client:
            return {
                index: result
                async for index, result in client.map(["a"] * 300, task="embed", ordered=True)
            }

    found = asyncio.run(scenario())
    assert list(found) == list(range(300))
    assert all(result.ok for result in found.values())


def test_each_row_has_one_result_although_workers_are_killed(
    plant: Plant, kill_a_worker: Callable[[], None]
) -> None:
    rows = [f"row {number}" for number in range(10_000)]
    seen: dict[int, Result] = {}
    with client_of(plant) as client:
        for index, result in client.map(rows, task="embed"):
            assert index not in seen
            seen[index] = result
            if index in (1000, 5000):
                kill_a_worker()
    assert sorted(seen) == list(range(10_000))
    assert all(result.ok for result in seen.values())
