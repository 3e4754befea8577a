"""Commands that the users of `deploy/users.acl` may not give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.deploy.day import Day
from tests.deploy.rights import is_refused
from tests.support.brokers import GuardedServer
from tests.support.builders import random_name
from tokenyard import Cancellation
from tokenyard.broker.check import check_broker
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import DesiredState, Order
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.scripts import Scripts
from tokenyard.scripts.client import request_cancel

MANAGEMENT = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("KEYS", "*"),
    ("SCRIPT", "FLUSH"),
    ("SCRIPT", "KILL"),
    ("FUNCTION", "FLUSH"),
    ("EVAL", "return 1", "0"),
    ("ACL", "LIST"),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("SHUTDOWN",),
    ("REPLICAOF", "NO", "ONE"),
    ("SAVE",),
    ("SWAPDB", "0", "1"),
]


@pytest.mark.parametrize("user", ["client", "coordinator", "worker", "admin", "batch", "gateway"])
def test_no_user_of_a_yard_manages_the_server(guarded: GuardedServer, user: str) -> None:
    # If a user of a yard gives commands of the server's keeper,
    # I expect all to be refused.
    with redis.Redis.from_url(guarded.url_of(user)) as connection:
        assert [one for one in MANAGEMENT if not is_refused(connection, *one)] == []
        # `admin` needs SCAN to find requests, the coordinator to find those with a lost entry.
        assert is_refused(connection, "SCAN", "0") == (user not in {"admin", "coordinator"})


@pytest.fixture
def yard() -> Keys:
    return Keys(random_name("yard"))


@pytest.fixture
def client(guarded: GuardedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(guarded.url_of("client")) as connection:
        yield connection


def test_client_reads_only_its_own_requests(client: redis.Redis, yard: Keys) -> None:
    # Given a client, also under a longer name of its own
    for name in ("client", "client-1"):
        # I expect it to read its ledgers and replies,
        assert client.hgetall(yard.ledger(name, "q1")) == {}
        assert client.get(yard.tokens(name, "q1")) is None
        assert client.xread({yard.reply(name, "q1"): "0"}) == []
        assert client.xread({yard.replies(name): "0"}) == []
    for name in ("bob", "client1", "client.1", "anon"):
        # but not those of others,
        assert is_refused(client, "HGETALL", yard.ledger(name, "q1"))
        assert is_refused(client, "HMGET", yard.ledger(name, "q1"), "result")
        assert is_refused(client, "GET", yard.tokens(name, "q1"))
        assert is_refused(client, "XREAD", "STREAMS", yard.reply(name, "q1"), "0")
        assert is_refused(client, "XREAD", "STREAMS", yard.replies(name), "0")
        assert is_refused(client, "XTRIM", yard.replies(name), "MAXLEN", "0")
        assert is_refused(client, "SADD", yard.attached(name), "q1")
    # nor waiting or running requests.
    for stream in (yard.intake("normal"), yard.lane("w.1"), yard.dead, yard.events, yard.control):
        assert is_refused(client, "XRANGE", stream, "-", "+")
        assert is_refused(client, "XREAD", "STREAMS", stream, "0")
    assert is_refused(client, "GET", "something else")


def test_client_gains_no_rights_from_scripts_of_others(
    guarded: GuardedServer, client: redis.Redis, yard: Keys
) -> None:
    # Given loaded scripts of another user, some of which hide their key
    with redis.Redis.from_url(guarded.url_of("default")) as keeper:
        named = keeper.script_load("return redis.call('HGETALL', KEYS[1])")
        hidden = keeper.script_load("return redis.call('HGETALL', ARGV[1])")
        caught = keeper.script_load("return redis.pcall('XADD', ARGV[1], '*', 'id', 'q1')")

    # I expect them to read the client's own ledger, but no other, and to write no lane.
    assert client.evalsha(named, 1, yard.ledger("client", "q1")) == []
    assert is_refused(client, "EVALSHA", named, 1, yard.ledger("bob", "q1"))
    assert is_refused(client, "EVALSHA", hidden, 0, yard.ledger("bob", "q1"))
    assert is_refused(client, "EVALSHA", caught, 0, yard.lane("w.1"))


@pytest.mark.parametrize("name", ["client", "client-1"])
def test_coordinator_cancels_a_clients_own_requests(guarded: GuardedServer, name: str) -> None:
    # Given a waiting request of a client without the right to remove it
    day = Day(guarded)
    with day.plant:
        day.coordinator()
        with day.client(name) as client:
            handle = client.submit([1], model="sim", id="waits")
            assert is_refused_to_cancel(guarded, day.keys, name, "waits")

            # If the client cancels it, I expect the coordinator to cancel it,
            assert handle.cancel() == Cancellation.CANCELLED
            assert handle.wait().status == "cancelled"
            # and an immediate answer for an ended or unknown request.
            assert handle.cancel() == Cancellation.OVER
            assert client.cancel("later") == Cancellation.CANCELLED_BEFORE_ARRIVAL


def is_refused_to_cancel(guarded: GuardedServer, keys: Keys, client: str, request_id: str) -> bool:
    with redis.Redis.from_url(guarded.url_of("client")) as connection:
        try:
            Scripts(Yard(connection, keys)).cancel(client, request_id, "by itself")
        except redis.exceptions.NoPermissionError:
            return True
    return False


def test_client_cancels_no_requests_of_others(
    client: redis.Redis, guarded: GuardedServer, yard: Keys
) -> None:
    # Given a client that may cancel its own requests
    scripts = Scripts(Yard(client, yard))
    assert scripts.call(request_cancel(yard, "client-1", "q1"))

    # I expect it to cancel none of others,
    for name in ("bob", "client1", "anon"):
        assert is_refused(client, "SADD", yard.cancels(name), "q1")
        with pytest.raises(redis.exceptions.NoPermissionError):
            scripts.call(request_cancel(yard, name, "q1"))
    # and to read or delete no cancel requests.
    assert is_refused(client, "XRANGE", yard.cancelling, "-", "+")
    assert is_refused(client, "DEL", yard.cancelling)
    assert is_refused(client, "SMEMBERS", yard.cancels("bob"))


def test_another_client_has_the_same_rights_under_its_own_name(
    guarded: GuardedServer, yard: Keys
) -> None:
    # Given bob, another client
    with redis.Redis.from_url(guarded.url_of("bob")) as bob:
        # I expect bob to read his own ledgers,
        assert bob.hgetall(yard.ledger("bob", "q1")) == {}
        assert bob.hgetall(yard.ledger("bob-2", "q1")) == {}
        # and none of the client's.
        assert is_refused(bob, "HGETALL", yard.ledger("client", "q1"))
        assert is_refused(bob, "XREAD", "STREAMS", yard.replies("client"), "0")


@pytest.mark.parametrize("user", ["client", "worker", "batch", "gateway"])
def test_only_operators_and_the_leader_give_signals(
    guarded: GuardedServer, yard: Keys, user: str
) -> None:
    with redis.Redis.from_url(guarded.url_of(user)) as connection:
        # If another user gives a signal, by script or by hand, I expect a refusal.
        with pytest.raises(redis.ResponseError, match=r"ermission|ACL failure"):
            Scripts(Yard(connection, yard)).signal(
                Order(signal="PAUSE"), b"", DesiredState(run_state="PAUSED")
            )
        assert is_refused(connection, "HSET", yard.desired, "all", "{}")
        assert is_refused(connection, "HDEL", yard.desired, "all")
        assert is_refused(connection, "DEL", yard.desired)
        # Workers read desired states to obey them, and the view of the yard shows them.
        may_read = user in {"worker", "batch"}
        assert is_refused(connection, "HGETALL", yard.desired) is not may_read


def test_operators_give_signals_but_delete_no_desired_states(
    guarded: GuardedServer, yard: Keys
) -> None:
    with redis.Redis.from_url(guarded.url_of("admin")) as connection:
        signals = Signals(Yard(connection, yard))
        given = signals.give(Order(signal="PAUSE"))
        assert signals.wait(given, 30.0) == []
        [(scope, desired_state)] = signals.desired_states().by_scope.items()
        assert (scope, desired_state.run_state) == ("all", "PAUSED")
        signals.give(Order(signal="UNPAUSE"))
        assert is_refused(connection, "DEL", yard.desired)


def test_users_without_a_password_cannot_log_in(tmp_path: Path) -> None:
    # Given the unchanged file, and a password for one user
    server = GuardedServer("valkey", tmp_path, ["worker"])
    server.start()
    try:
        # I expect all other users to be refused,
        for user in ("client", "coordinator", "admin", "batch", "gateway"):
            with (
                redis.Redis.from_url(server.url_of(user)) as connection,
                pytest.raises(redis.AuthenticationError),
            ):
                connection.ping()
        # also those without a name.
        with redis.Redis(port=server.port) as connection, pytest.raises(redis.AuthenticationError):
            connection.ping()
    finally:
        server.stop()


def test_the_configured_server_passes_the_checks_of_a_broker(guarded: GuardedServer) -> None:
    # Given the server as deploy/ configures it
    with redis.Redis.from_url(guarded.url_of("default")) as keeper:
        # I expect no warning,
        assert check_broker(keeper) == []
        # and no timeout of idle connections.
        assert keeper.config_get("timeout") == {"timeout": "0"}
