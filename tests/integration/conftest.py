"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers import Cluster
from tests.support.lanes import Lanes
from tests.support.servers import Server
from tests.support.watched import Keep


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
