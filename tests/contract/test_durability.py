"""Durability: guarantees that a submission awaits beyond Redis's acknowledgement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.contract.conftest import NewClient
from tests.contract.stand_in import StandIn
from tests.support.brokers import ServerWith
from tests.support.waiting import eventually
from tokenyard import InvalidRequest, NotDurable
from tokenyard.client import submission
from tokenyard.client.options import Durability
from tokenyard.protocol.keys import Keys

pytestmark = pytest.mark.usefixtures("no_leftover_processes")


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[ServerWith]:
    """A server that syncs its disk once a second, Redis's default."""
    folder = tmp_path / "primary"
    folder.mkdir()
    server = ServerWith("valkey", folder, "--appendfsync", "everysec")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def there(primary: ServerWith, keys: Keys) -> Iterator[redis.Redis]:
    """A connection to the server, and a yard on it."""
    with StandIn.at(primary.url, keys) as yard:
        yield yard.connection


def waits(connection: redis.Redis, command: str) -> int:
    """The number of such waits of all clients."""
    seen = connection.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})
    return int(seen["calls"])


def is_online(connection: redis.Redis) -> bool:
    return connection.info("replication").get("slave0", {}).get("state") == "online"


def known(connection: redis.Redis, keys: Keys) -> int:
    return len(list(connection.scan_iter(f"*{{{keys.yard}}}:request:*")))


@pytest.mark.parametrize(("level", "command"), [("memory", None), ("disk", "waitaof")])
def test_a_durable_burst_waits_once(
    primary: ServerWith, there: redis.Redis, new_client_at: NewClient, level: str, command: str
) -> None:
    client = new_client_at(primary.url)

    handles = client.submit_many(["a", "b", "c"] * 20, durability=level)

    assert len(handles) == 60
    assert {name: waits(there, name) for name in ("waitaof", "wait")} == {
        "waitaof": int(command == "waitaof"),
        "wait": 0,
    }


@pytest.mark.long
def test_a_replica_has_the_request_when_the_submission_returns(
    primary: ServerWith, there: redis.Redis, new_client_at: NewClient, tmp_path: Path, keys: Keys
) -> None:
    folder = tmp_path / "replica"
    folder.mkdir()
    replica = ServerWith("valkey", folder, "--replicaof", f"127.0.0.1 {primary.port}")
    replica.start()
    try:
        eventually(lambda: is_online(there), timeout_s=30)
        client = new_client_at(primary.url)
        handles = client.submit_many(["a"] * 30, durability="replicated")
        with redis.Redis.from_url(replica.url) as copy:
            assert known(copy, keys) == len(handles)
    finally:
        replica.stop()
    assert waits(there, "wait") == 1


@pytest.mark.parametrize(
    ("level", "why"),
    [
        ("replicated", "did not have it at a replica within"),
        ("disk", "the server refuses: WAITAOF cannot be used when"),
    ],
)
def test_who_submits_again_waits_again(
    primary: ServerWith,
    there: redis.Redis,
    new_client_at: NewClient,
    monkeypatch: pytest.MonkeyPatch,
    keys: Keys,
    level: Durability,
    why: str,
) -> None:
    """Given no replica and no AOF, I expect each submission to say so, whichever client's it is."""
    monkeypatch.setattr(submission, "WAIT_S", 0.2)
    there.config_set("appendonly", "no")
    client, other = (new_client_at(primary.url, client_id="ann") for _ in range(2))
    client.submit("a", id="q1")

    for one in (client, client, other):
        with pytest.raises(NotDurable, match=why) as caught:
            one.submit("a", id="q1", durability=level)
        [handle] = caught.value.accepted
        assert (handle.id, handle.status().state) == ("q1", "waiting")

    # I expect it to run once, and to be accepted when it is where it shall be.
    assert known(there, keys) == 1
    with monkeypatch.context() as patch:
        patch.setattr(submission, "durability_error", lambda *_: "")
        assert client.submit("a", id="q1", durability=level).id == "q1"
    with pytest.raises(NotDurable):
        next(iter(client.map(["b"], durability=level)))


def test_a_server_without_waitaof_is_named(
    tmp_path: Path, new_client_at: NewClient, keys: Keys
) -> None:
    server = ServerWith("redis", tmp_path)
    server.start()
    try:
        with StandIn.at(server.url, keys) as yard:
            if yard.connection.info("server")["redis_version"] >= "7.2":
                pytest.skip("this Redis has WAITAOF; Debian's 7.0, on which this runs, has not")
            with pytest.raises(NotDurable, match="the server has no WAITAOF"):
                new_client_at(server.url).submit("a", durability="disk")
    finally:
        server.stop()


def test_an_unknown_durability_is_refused(new_client: NewClient, yard: StandIn) -> None:
    with pytest.raises(InvalidRequest, match="use one of memory, disk, replicated"):
        new_client().submit("a", durability="certain")
