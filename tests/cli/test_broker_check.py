"""The check of a broker at start, on real servers."""

from __future__ import annotations

import redis

from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.broker.check import check_broker


def test_a_server_that_evicts_is_a_warning(own_broker: Server) -> None:
    with redis.Redis.from_url(own_broker.url) as connection:
        connection.config_set("maxmemory-policy", "allkeys-lru")
        [warning] = check_broker(connection)
        assert "allkeys-lru" in warning


def test_the_probe_leaves_no_key_behind(connection: redis.Redis) -> None:
    check_broker(connection, "a-yard-of-its-own")
    assert not eventually(lambda: [connection.keys("*a-yard-of-its-own*")])[0]
