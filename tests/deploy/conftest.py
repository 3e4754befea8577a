"""Servers with the configuration of `deploy/`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.deploy.rights import denied
from tests.support.brokers import GuardedServer
from tokenyard.scripts.calls import load_scripts

#: The users that may log in; each password is the user's name.
USERS = ("client", "coordinator", "worker", "admin", "batch", "gateway", "default")


@pytest.fixture(scope="module", params=["valkey", "redis"])
def guarded(
    request: pytest.FixtureRequest,
    no_leftover_processes: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GuardedServer]:
    """A server with the users of `deploy/users.acl`; bob is another client."""
    folder = tmp_path_factory.mktemp(request.param)
    server = GuardedServer(request.param, folder, USERS, clients=["bob"])
    server.start()
    load_all(server)
    yield server
    server.stop()


def load_all(server: GuardedServer) -> None:
    """Load the scripts, as every coordinator does, for tests without one."""
    with redis.Redis.from_url(server.url_of("default")) as keeper:
        load_scripts(keeper)


@pytest.fixture
def emptied(guarded: GuardedServer) -> GuardedServer:
    """The same server without any keys, and without refusals so far."""
    with redis.Redis.from_url(guarded.url_of("default")) as keeper:
        keeper.flushall()
    denied(guarded)
    return guarded
