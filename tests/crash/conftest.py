"""The yard of the crash tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import Plant
from tests.support.servers import Server


@pytest.fixture
def plant(valkey_broker: Server) -> Iterator[Plant]:
    """A yard of real processes, which the test starts and kills."""
    with Plant(valkey_broker.url) as started:
        yield started
