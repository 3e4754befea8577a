"""The check of a broker at start, on real servers."""

from __future__ import annotations

import redis

from tests.support.waiting import eventually
from tokenyard.broker.check import check_broker


def test_the_probe_leaves_no_key_behind(connection: redis.Redis) -> None:
    check_broker(connection, "a-yard-of-its-own")
    assert not eventually(lambda: [connection.keys("*a-yard-of-its-own*")])[0]
