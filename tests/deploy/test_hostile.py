"""Hostile use of rights that users have: others are still served."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.deploy.conftest import GUESTS_YARD
from tests.deploy.rights import denied
from tests.deploy.test_guests import GuestDay
from tests.support.brokers import GuardedServer
from tests.support.builders import make_request
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.scripts import attend, request_cancel, submit

HIGHEST = "18446744073709551615-18446744073709551615"


@pytest.fixture
def day(emptied: GuardedServer, request: pytest.FixtureRequest) -> Iterator[GuestDay]:
    """A busy yard that cuts guests off only briefly; a parameter is the width of its worker."""
    day = GuestDay(emptied)
    with day.plant:
        day.open(
            guest_cut_off_s=0.5,
            guest_inbox_bytes=8_000_000,
            max_request_bytes=100_000,
            max_num_queued_reqs=1000,
            # No machine is stopped for so long that another leader is not the tests' doing.
            lease_ms=60_000,
        )
        day.worker("w", model_name="sim", max_num_seqs=getattr(request, "param", 256))
        day.plant.wait_for_workers(1)
        yield day


@contextlib.contextmanager
def guest(day: GuestDay, name: str = "guest") -> Iterator[redis.Redis]:
    with redis.Redis.from_url(day.server.url_of(name), socket_timeout=60.0) as connection:
        yield connection


def check_that_others_are_served(day: GuestDay) -> None:
    """Check that a trusted client and another guest get answers from the same leader."""
    with day.client() as client:
        assert client.submit([1, 2], max_tokens=3).result(60).ok
    with Client(day.server.url_of("eve"), GUESTS_YARD, "eve-1") as other:
        assert other.submit([1, 2], max_tokens=3).result(60).ok
    leader: Any = day.plant.connection.get(day.keys.leader)
    assert leader.startswith(b"1:")


def check_that_the_guest_is_heard_again(day: GuestDay) -> None:
    def is_served() -> bool:
        with (
            Client(
                day.server.url_of("guest"), GUESTS_YARD, "guest-1", connect_timeout_s=5.0
            ) as client,
            contextlib.suppress(Exception),
        ):
            return client.submit([1, 2], max_tokens=3).result(20).ok
        return False

    eventually(is_served, timeout_s=60.0)


def is_cut_off(day: GuestDay) -> bool:
    return "guest guest is cut off" in day.plant.programs[0].log


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "q1", "prompt": "x" * 200_000},
        {f"field-{n}": "" for n in range(200_000)},
        {"id": "q1", "prompt": "x", **{f"f{n}": "x" for n in range(130)}},
    ],
    ids=["long", "very wide", "wide"],
)
def test_a_too_large_entry_cuts_its_guest_off_for_a_while(
    day: GuestDay, fields: dict[Any, Any]
) -> None:
    with guest(day) as connection:
        connection.xadd(day.keys.inbox("guest"), fields)
    eventually(lambda: is_cut_off(day))
    check_that_others_are_served(day)
    check_that_the_guest_is_heard_again(day)


def test_an_inbox_that_grows_too_large_is_deleted(day: GuestDay) -> None:
    inbox = day.keys.inbox("guest")
    with guest(day) as connection, connection.pipeline(transaction=False) as pipeline:
        for _ in range(300):
            pipeline.xadd(inbox, {"id": "q1", "prompt": "x" * 99_000})
        pipeline.execute()
    eventually(lambda: is_cut_off(day))
    eventually(lambda: not day.plant.connection.exists(inbox))
    check_that_others_are_served(day)


def test_a_flood_of_entries_delays_no_other_client(day: GuestDay) -> None:
    inbox = day.keys.inbox("guest")
    with guest(day) as connection:
        for _ in range(20):
            with connection.pipeline(transaction=False) as pipeline:
                for number in range(1000):
                    pipeline.xadd(inbox, {"id": f"q{number}", "prompt": "", "client": "guest"})
                pipeline.execute()
        assert connection.hgetall(day.keys.info)
    assert day.plant.connection.exists(inbox)
    check_that_others_are_served(day)
    eventually(lambda: not day.plant.connection.exists(inbox), timeout_s=60.0)


def test_guests_fill_only_half_of_the_queue(day: GuestDay) -> None:
    # Given a yard whose workers are paused
    day.command_as_default("pause")
    inbox = day.keys.inbox("guest")
    with guest(day) as connection, connection.pipeline(transaction=False) as pipeline:
        for number in range(1000):
            pipeline.xadd(inbox, {"id": f"q{number}", "prompt": "x"})
        pipeline.execute()
    eventually(lambda: not day.plant.connection.exists(inbox), timeout_s=60.0)
    # I expect half of the queue to stay free for trusted clients.
    waiting = day.plant.connection.xlen(day.keys.intake("normal"))
    assert waiting == 500
    day.command_as_default("unpause")
    with day.client() as client:
        assert client.submit([1], max_tokens=1).result(60).ok


def test_the_highest_id_in_an_inbox_blocks_no_guest(day: GuestDay) -> None:
    with guest(day) as connection:
        connection.xadd(day.keys.inbox("guest"), {"id": "q1", "prompt": "x"}, id=HIGHEST)
    check_that_others_are_served(day)
    check_that_the_guest_is_heard_again(day)


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "q1", "prompt": "x", "client": "eve"},
        {"id": "q1", "prompt": "x", "client": "client"},
        {"id": "q1", "prompt": "x", "common": '{"client":"eve"}'},
        {"id": "q1", "prompt": "x", "client": b"\xff\xfe"},
        {"id": "q1", "prompt": "x", "client": "guest", "reply_to": "replies:eve"},
        {"id": b"\xff\xfe", "prompt": "x"},
        {"prompt": "x"},
        {"id": "q1", "prompt": "x", "common": "[" * 90_000},
        {"do": "cancel", "client": "eve", "id": "theirs"},
        {"do": "cancel", "id": "x" * 201},
        {"do": "attend", "ended": "[" * 90_000},
        {"do": "attend", "client": "eve", "leave": "1"},
        {"do": b"\xff"},
        {"id": "q1", "prompt": "x", "receipt": "x" * 101},
        {"id": "q1", "prompt": "x", "class": "retry"},
        {"id": "q1", "prompt": "x", "result_ttl": "9" * 5000},
        {"id": "q1", "prompt": "x", "priority": "-1"},
    ],
)
def test_a_guest_acts_for_nobody_else(day: GuestDay, fields: dict[Any, Any]) -> None:
    # Given a waiting request of another guest
    day.command_as_default("pause")
    with Client(day.server.url_of("eve"), GUESTS_YARD, "eve") as other:
        theirs = other.submit([1], id="theirs", model="sim", cancel_on_disconnect=True)
        before = day.plant.connection.xlen(day.keys.intake("normal"))
        # If a guest writes a forbidden entry,
        with guest(day) as connection:
            connection.xadd(day.keys.inbox("guest"), fields)
        # I expect the entry to be discarded, and the other's request to be untouched.
        eventually(lambda: not day.plant.connection.exists(day.keys.inbox("guest")))
        assert day.plant.connection.xlen(day.keys.intake("normal")) == before
        assert other.status("theirs").state in {"waiting", "assigned"}
        day.command_as_default("unpause")
        assert theirs.result(60).ok


@pytest.mark.parametrize("named", [{"tenant": "eve"}, {"common": '{"tenant":"eve"}'}, {}])
@pytest.mark.parametrize("is_registered", [True, False])
def test_a_guest_spends_only_its_own(
    day: GuestDay, named: dict[Any, Any], is_registered: bool
) -> None:
    # Given a yard with the tenant eve, and a guest that claims to be it
    keys, keeper = day.keys, day.plant.connection
    registered = {"eve": "{}", **({"guest": "{}"} if is_registered else {})}
    keeper.hset(keys.tenants, mapping=registered)
    day.command_as_default("pause")
    with guest(day) as connection:
        connection.xadd(keys.inbox("guest"), {"id": "q1", "prompt": "x", **named})
    own = keys.intake("normal:guest" if is_registered else "normal")
    eventually(lambda: keeper.xlen(own) == 1)
    # I expect that it counts for the guest or nobody, and that eve has not been charged.
    assert not keeper.exists(keys.intake("normal:eve"), keys.tenant("eve"))
    day.command_as_default("unpause")
    ledger = keys.ledger("guest", "q1")
    eventually(lambda: keeper.hget(ledger, "state") == b"completed", timeout_s=60.0)
    assert not keeper.exists(keys.tenant("eve"), keys.usage("eve"))
    assert bool(keeper.exists(keys.usage("guest"))) is is_registered
    keeper.delete(keys.tenants)


@pytest.mark.parametrize("day", [4], indirect=True)
def test_a_flood_of_one_tenant_delays_no_other(day: GuestDay) -> None:
    keys, keeper = day.keys, day.plant.connection
    keeper.hset(keys.tenants, mapping={"eve": "{}", "guest": "{}"})
    with guest(day) as connection, connection.pipeline(transaction=False) as pipeline:
        for number in range(2000):
            one: dict[Any, Any] = {"id": f"q{number}", "prompt": "x"}
            pipeline.xadd(keys.inbox("guest"), {**one, "params": '{"max_tokens":200}'})
        pipeline.execute()
    eventually(lambda: int(keeper.hget(keys.tenant("guest"), "waiting") or 0) > 100)
    with Client(day.server.url_of("eve"), GUESTS_YARD, "eve-1") as other:
        assert other.submit([1, 2], max_tokens=3).result(60).ok
    assert int(keeper.hget(keys.tenant("guest"), "waiting") or 0) > 0
    keeper.delete(keys.tenants)


def test_fields_of_the_system_in_a_guests_entry_are_dropped(day: GuestDay) -> None:
    day.command_as_default("pause")
    own: dict[Any, Any] = {
        "id": "q1",
        "prompt": "x",
        "attempt": "7",
        "crashed_alone": "9",
        "unknown": "x",
    }
    with guest(day) as connection:
        connection.xadd(day.keys.inbox("guest"), own)
        eventually(lambda: day.plant.connection.xlen(day.keys.intake("normal")))
    found: Any = day.plant.connection.xrange(day.keys.intake("normal"))
    [(_, fields)] = found
    assert fields.keys() == {b"id", b"prompt", b"common"}
    assert not any(name in fields[b"common"] for name in (b"attempt", b"crashed", b"unknown"))
    day.command_as_default("unpause")


@pytest.mark.parametrize("user", ["client", "guest"])
def test_a_value_of_512_mb_is_refused_before_it_is_sent(day: GuestDay, user: str) -> None:
    key = day.keys.inbox("guest") if user == "guest" else day.keys.intake("normal")
    with socket.create_connection(("127.0.0.1", day.server.port), 10) as raw:
        raw.sendall(f"AUTH {user} {user}\r\n".encode())
        assert raw.recv(100).startswith(b"+OK")
        raw.sendall(f"*5\r\n$4\r\nXADD\r\n${len(key)}\r\n{key}\r\n$1\r\n*\r\n$1\r\nx\r\n".encode())
        raw.sendall(b"$536870912\r\n")
        assert b"invalid bulk length" in raw.recv(200)


def test_many_blocked_reads_delay_no_other_client(day: GuestDay) -> None:
    inbox_reads = f"XREAD BLOCK 0 STREAMS {day.keys.replies('guest')} $\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", day.server.port), 10))
            raw.sendall(b"AUTH guest guest\r\n" + inbox_reads)
        check_that_others_are_served(day)


def test_invalid_names_among_the_clients_delay_no_cancel(day: GuestDay) -> None:
    # Given invalid names in `clients` and invalid ids, written by a trusted client
    names: dict[Any, float] = {b"\xff\xfe%d" % number: number for number in range(300)}
    with day.connect("client") as connection:
        connection.zadd(day.keys.clients, names)
        connection.zadd(day.keys.clients, {"client": 1})
        connection.sadd(day.keys.attached("client"), b"\xff", b"x" * 300)
        # If a client listed after them vanishes,
        keys = day.keys
        request = make_request("left", client="client-2", model="no-such")
        day.command_as_default("pause")
        one = submit(keys, "normal", [request], watched="client-2")
        day.plant.scripts.call(one)
        day.plant.scripts.call(attend(keys, "client-2", [], lease_ms=1))
    # I expect its request to be cancelled, and the names to be removed.
    ledger = day.keys.ledger("client-2", "left")
    eventually(lambda: day.plant.connection.hget(ledger, "state") in {b"cancelled", b"failed"})
    eventually(lambda: not day.plant.connection.zcard(day.keys.clients), timeout_s=60.0)
    assert "it is not a name" in day.plant.programs[0].log
    day.command_as_default("unpause")


def test_the_highest_id_on_cancels_delays_no_cancel(day: GuestDay) -> None:
    with day.connect("client") as connection:
        connection.xadd(day.keys.cancelling, {"client": b"\xff\xfe"}, id=HIGHEST)
    eventually(lambda: "deleted the stream of cancels" in day.plant.programs[0].log, timeout_s=60.0)
    day.plant.scripts.call(request_cancel(day.keys, "client", "later"))
    ledger = day.keys.ledger("client", "later")
    eventually(lambda: day.plant.connection.hget(ledger, "state") == b"cancelled")


def test_the_highest_id_on_arrivals_delays_no_tenant(day: GuestDay) -> None:
    keys, keeper = day.keys, day.plant.connection
    with day.connect("client") as connection, day.client() as client:
        connection.xadd(keys.arrivals, {"event": "x"}, id=HIGHEST)
        for _ in range(3):
            assert client.submit([1, 2], tenant="client", max_tokens=3).result(60).ok
    eventually(lambda: keeper.xinfo_stream(keys.arrivals)["last-generated-id"] < HIGHEST.encode())


@pytest.mark.parametrize("value", ["garbage", "inf", "-5", "9" * 30, "9223372036854775807"])
def test_invalid_counters_stop_no_client(day: GuestDay, value: str) -> None:
    with day.connect("client") as connection:
        counted: dict[Any, Any] = {"queued_tokens": value, "count:QUEUE_FULL": value}
        connection.hset(day.keys.tally, mapping=counted)
    check_that_others_are_served(day)


@pytest.mark.parametrize("value", ["garbage", "9223372036854775807", "-1"])
def test_invalid_numbers_of_the_handshake_stop_no_leader(day: GuestDay, value: str) -> None:
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
    day.coordinator(guests="guest,eve")
    day.plant.wait_for_leader(other_than=leader)
    day.worker("late", model_name="sim")
    day.plant.wait_for_workers(2)
    with day.client() as client:
        assert client.submit([1, 2], max_tokens=3, model="sim").result(60).ok


def test_clients_wait_until_lost_scripts_are_loaded_again(day: GuestDay) -> None:
    with redis.Redis.from_url(day.server.url_of("default")) as keeper, day.client() as client:
        keeper.script_flush()
        assert client.submit([1, 2], max_tokens=3).result(60).ok
        assert denied(day.server) != []  # its first attempt
