"""Users may check whether the server takes writes, and are refused nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.conftest import SERVERS
from tests.deploy.conftest import load_all
from tests.deploy.rights import denied
from tests.support.brokers import GuardedServer
from tokenyard.broker.check import write_error
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.keys import Keys, Yard

USERS = ("client", "coordinator", "worker", "admin", "batch")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GuardedServer]:
    others = ("default", "replica", "sentinel")
    started = GuardedServer(request.param, tmp_path, (*USERS, *others))
    started.start()
    load_all(started)
    yield started
    started.kill()


def test_each_user_sees_a_server_without_memory(server: GuardedServer) -> None:
    def seen() -> set[str]:
        errors = set()
        for user in USERS:
            with open_connection(server.url_of(user)) as connection:
                errors.add(write_error(Yard(connection, Keys("main"))))
        return errors

    assert seen() == {""}
    with redis.Redis.from_url(server.url_of("default")) as connection:
        connection.config_set("maxmemory", 1)
    (error,) = seen()
    assert error.endswith("(OOM)")
    assert denied(server) == []
