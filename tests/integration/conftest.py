"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers import Cluster
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
