"""Boards and the yards that they show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.board.device_yard import DeviceYard
from tests.board.visitor import Visitor
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts


@pytest.fixture
def devices(connection: redis.Redis, keys: Keys, scripts: Scripts, redis_url: str) -> DeviceYard:
    """A yard whose hosts and workers the test writes."""
    return DeviceYard(connection, keys, scripts, redis_url)


@pytest.fixture
def visitor(redis_url: str, keys: Keys) -> Iterator[Visitor]:
    """Somebody at the board of that yard, who may do everything."""
    visiting = Visitor(redis_url, keys.yard)
    yield visiting
    visiting.close()
