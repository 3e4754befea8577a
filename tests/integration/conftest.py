"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support.brokers import Cluster
from tests.support.lanes import Lanes
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.watched import Keep
from tests.support.yard import Yard
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Starts servers and ends them after the test."""
    kept: list[Server | Cluster] = []

    def start(server: Server | Cluster) -> None:
        kept.append(server)
        server.start()

    yield start
    for server in reversed(kept):
        server.stop()


@pytest.fixture
def lanes(broker: Server) -> Iterator[Lanes]:
    """A yard whose workers are played by the test."""
    opened = Lanes(broker.url)
    yield opened
    opened.close()


@pytest.fixture
def plant(valkey_broker: Server) -> Iterator[Plant]:
    """A yard of real processes, which the test starts."""
    with Plant(valkey_broker.url) as started:
        yield started


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, scripts: Scripts) -> Yard:
    """A yard whose leader and workers are calls of scripts."""
    return Yard(connection, keys, scripts)
