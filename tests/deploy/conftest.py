"""Servers as `deploy/` starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.brokers import GuardedServer
from tests.support.servers import ServerName, find_binary

#: The users that may log in; their passwords are their names.
USERS = ("client", "coordinator", "worker", "admin", "scaler", "default")


@pytest.fixture(scope="session")
def binary() -> Callable[[ServerName], Path]:
    """The program of a server; skips where it is not installed, but not in CI."""

    def find(name: ServerName) -> Path:
        found = find_binary(name)
        if found is None:
            reason = f"{name}-server is not installed, so deploy/ was not tested on {name}"
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
        return found

    return find


@pytest.fixture(scope="module", params=["valkey", "redis"])
def guarded(
    request: pytest.FixtureRequest,
    binary: Callable[[ServerName], Path],
    no_leftover_processes: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GuardedServer]:
    """A server with the users of `deploy/users.acl`; bob is another client."""
    folder = tmp_path_factory.mktemp(request.param)
    server = GuardedServer(request.param, binary(request.param), folder, USERS, clients=["bob"])
    server.start()
    yield server
    server.stop()
