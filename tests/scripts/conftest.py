"""A fresh yard for each test of a script."""

from __future__ import annotations

import pytest
import redis

from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts import Scripts

pytest.register_assert_rewrite("tests.scripts.model", "tests.scripts.walk")


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, scripts: Scripts) -> PlayedYard:
    """A yard with a leader, on both servers in turn."""
    return PlayedYard(connection, keys, scripts)


@pytest.fixture
def worker(yard: PlayedYard) -> str:
    """A worker of the yard, with a lease and an empty lane."""
    return yard.worker()


@pytest.fixture
def assignment(yard: PlayedYard, worker: str) -> Assignment:
    """A stream on the lane of that worker."""
    return yard.assign(worker, make_request(stream=True))


@pytest.fixture
def waiting(yard: PlayedYard) -> QueuedRequest:
    """A request that was submitted."""
    return yard.submit()
