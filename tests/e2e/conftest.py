"""`tokenyard up` with two real vLLM workers, for the tests that change its workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support.builders import random_name
from tests.support.up import Up, running_up
from tokenyard import Client
from tokenyard.protocol.keys import Keys


@pytest.fixture(scope="session")
def adder_yard(
    no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Up]:
    """`tokenyard up` alone: embedded broker, coordinator, two workers that serve the adder."""
    with running_up(tmp_path_factory.mktemp("up")) as up:
        yield up


@pytest.fixture
def client(adder_yard: Up) -> Iterator[Client]:
    """A new client for each test."""
    with Client(adder_yard.url, yard=adder_yard.yard, client_id=random_name("client")) as one:
        yield one


@pytest.fixture
def broker_connection(adder_yard: Up) -> Iterator[redis.Redis]:
    """A plain redis-py connection, like that of a program in any language."""
    with redis.Redis.from_url(adder_yard.url, socket_timeout=70.0, protocol=2) as one:
        yield one


@pytest.fixture
def yard_keys(adder_yard: Up) -> Keys:
    """The keys of the yard."""
    return Keys(adder_yard.yard)
