"""A fresh yard for each test of a script."""

from __future__ import annotations

import pytest
import redis

from tests.support.yard import Yard
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts

pytest.register_assert_rewrite("tests.scripts.model", "tests.scripts.walk")


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, scripts: Scripts) -> Yard:
    """A yard with a leader, on both servers in turn."""
    return Yard(connection, keys, scripts)


@pytest.fixture
def worker(yard: Yard) -> str:
    """A worker of the yard, with a lease and an empty lane."""
    return yard.worker()
