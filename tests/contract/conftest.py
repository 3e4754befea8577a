"""Both clients on both servers, and a stand-in for the rest of the yard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.contract.blocking import Loop, blocking_client
from tests.contract.stand_in import StandIn
from tokenyard import Client
from tokenyard.protocol.keys import Keys

NewClient = Callable[..., Any]
WAIT_S = 30.0


@pytest.fixture(params=["sync", "async"])
def new_client_at(request: pytest.FixtureRequest, keys: Keys) -> Iterator[NewClient]:
    """A function that makes clients of one kind for a URL; they are closed after the test."""
    loop = Loop() if request.param == "async" else None
    clients: list[Any] = []

    def make(url: str, **options: Any) -> Any:
        options = {
            "yard": keys.yard,
            "connect_timeout_s": WAIT_S,
            "result_timeout_s": WAIT_S,
        } | options
        client = blocking_client(loop, url, **options) if loop else Client(url, **options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
    if loop:
        loop.close()


@pytest.fixture
def new_client(new_client_at: NewClient, redis_url: str) -> NewClient:
    """The same, for the test's server."""
    return lambda **options: new_client_at(redis_url, **options)


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys) -> StandIn:
    """The test's yard, served by a stand-in."""
    stand_in = StandIn(connection, keys)
    stand_in.open()
    return stand_in
