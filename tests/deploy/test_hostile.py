"""Hostile use of rights that users have: others are still served."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.deploy.day import Day
from tests.deploy.rights import denied
from tests.support.brokers import GuardedServer
from tests.support.builders import make_request
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.scripts.client import attend, request_cancel, submit

HIGHEST = "18446744073709551615-18446744073709551615"


@pytest.fixture
def day(emptied: GuardedServer) -> Iterator[Day]:
    """A busy yard, which the test itself enters as the server's keeper."""
    day = Day(emptied, "default")
    with day.plant:
        # No machine is stopped for so long that another leader is not the tests' doing.
        day.coordinator(lease_ms=60_000)
        day.worker("w", model_name="sim")
        day.plant.wait_for_workers(1)
        yield day


def check_that_others_are_served(day: Day) -> None:
    """Check that two clients get answers from the same leader."""
    with day.client() as client:
        assert client.submit([1, 2], max_tokens=3).result(60).ok
    with Client(day.server.url_of("bob"), day.keys.yard, "bob-1") as other:
        assert other.submit([1, 2], max_tokens=3).result(60).ok
    leader: Any = day.plant.connection.get(day.keys.leader)
    assert leader.startswith(b"1:")


def test_a_value_of_512_mb_is_refused_before_it_is_sent(day: Day) -> None:
    key = day.keys.intake("normal")
    with socket.create_connection(("127.0.0.1", day.server.port), 10) as raw:
        raw.sendall(b"AUTH client client\r\n")
        assert raw.recv(100).startswith(b"+OK")
        raw.sendall(f"*5\r\n$4\r\nXADD\r\n${len(key)}\r\n{key}\r\n$1\r\n*\r\n$1\r\nx\r\n".encode())
        raw.sendall(b"$536870912\r\n")
        assert b"invalid bulk length" in raw.recv(200)


def test_many_blocked_reads_delay_no_other_client(day: Day) -> None:
    reads = f"XREAD BLOCK 0 STREAMS {day.keys.replies('client')} $\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", day.server.port), 10))
            raw.sendall(b"AUTH client client\r\n" + reads)
        check_that_others_are_served(day)


def test_invalid_names_among_the_clients_delay_no_cancel(day: Day) -> None:
    # Given invalid names in `clients` and invalid ids, written by a client
    names: dict[Any, float] = {b"\xff\xfe%d" % number: number for number in range(300)}
    with day.connect("client") as connection:
        connection.zadd(day.keys.clients, names)
        connection.zadd(day.keys.clients, {"client": 1})
        connection.sadd(day.keys.attached("client"), b"\xff", b"x" * 300)
        # If a client listed after them vanishes,
        keys = day.keys
        request = make_request("left", client="client-2", model="no-such")
        day.command("pause")
        one = submit(keys, "normal", [request], watched="client-2")
        day.plant.scripts.call(one)
        day.plant.scripts.call(attend(keys, "client-2", [], lease_ms=1))
    # I expect its request to be cancelled, and the names to be removed.
    ledger = day.keys.ledger("client-2", "left")
    eventually(lambda: day.plant.connection.hget(ledger, "state") in {b"cancelled", b"failed"})
    eventually(lambda: not day.plant.connection.zcard(day.keys.clients), timeout_s=60.0)
    assert "it is not a name" in day.plant.programs[0].log
    day.command("unpause")


def test_the_highest_id_on_cancels_delays_no_cancel(day: Day) -> None:
    with day.connect("client") as connection:
        connection.xadd(day.keys.cancelling, {"client": b"\xff\xfe"}, id=HIGHEST)
    eventually(lambda: "deleted the stream of cancels" in day.plant.programs[0].log, timeout_s=60.0)
    day.plant.scripts.call(request_cancel(day.keys, "client", "later"))
    ledger = day.keys.ledger("client", "later")
    eventually(lambda: day.plant.connection.hget(ledger, "state") == b"cancelled")


def test_the_highest_id_on_arrivals_delays_no_tenant(day: Day) -> None:
    keys, keeper = day.keys, day.plant.connection
    with day.connect("client") as connection, day.client() as client:
        connection.xadd(keys.arrivals, {"event": "x"}, id=HIGHEST)
        for _ in range(3):
            assert client.submit([1, 2], tenant="client", max_tokens=3).result(60).ok
    eventually(lambda: keeper.xinfo_stream(keys.arrivals)["last-generated-id"] < HIGHEST.encode())


@pytest.mark.parametrize("value", ["garbage", "inf", "-5", "9" * 30, "9223372036854775807"])
def test_invalid_counters_stop_no_client(day: Day, value: str) -> None:
    with day.connect("client") as connection:
        counted: dict[Any, Any] = {"queued_tokens": value, "count:QUEUE_FULL": value}
        connection.hset(day.keys.tally, mapping=counted)
    check_that_others_are_served(day)


@pytest.mark.parametrize("value", ["garbage", "9223372036854775807", "-1"])
def test_invalid_numbers_of_the_handshake_stop_no_leader(day: Day, value: str) -> None:
    """The default user writes them: of a yard's users only the system's may."""
    spoilt: dict[Any, Any] = {
        "epoch": value,
        "incarnation": value,
        "rate": "abc",
        "models": b"\xff",
    }
    day.plant.connection.hset(day.keys.info, mapping=spoilt)
    leader: Any = day.plant.connection.get(day.keys.leader)
    day.plant.programs[0].kill()
    day.plant.scripts.resign(leader.decode())
    day.coordinator()
    day.plant.wait_for_leader(other_than=leader)
    day.worker("late", model_name="sim")
    day.plant.wait_for_workers(2)
    with day.client() as client:
        assert client.submit([1, 2], max_tokens=3, model="sim").result(60).ok


def test_clients_wait_until_lost_scripts_are_loaded_again(day: Day) -> None:
    with redis.Redis.from_url(day.server.url_of("default")) as keeper, day.client() as client:
        keeper.script_flush()
        assert client.submit([1, 2], max_tokens=3).result(60).ok
        assert denied(day.server) != []  # its first attempt
