"""The short way to a server: which connection a command takes, and what becomes of a broken one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

import tokenyard.broker.direct
from tests.support.builders import random_name
from tests.support.fake_clock import FakeClock
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.broker.connection import open_connection
from tokenyard.broker.direct import ask_all


@pytest.fixture
def direct(broker: Server) -> Iterator[redis.Redis]:
    """A client that does not try again."""
    with open_connection(broker.url, timeout_s=30.0, retries=0) as opened:
        yield opened


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def is_blocked(connection: redis.Redis, client_id: int) -> bool:
    """Whether a connection waits in a command, by the server."""
    return any(
        one["id"] == str(client_id) and "b" in one["flags"] for one in connection.client_list()
    )


def cut(connection: redis.Redis, client_id: int) -> None:
    """End a connection at the server."""
    connection.client_kill_filter(_id=str(client_id))


def test_the_connection_that_was_just_used_is_used_again(direct: redis.Redis) -> None:
    assert {direct.client_id() for _ in range(5)} == {direct.client_id()}


def test_over_a_pool_that_is_not_ours_it_is_redis_pys_own_client(broker: Server) -> None:
    # Given a pool as RQ makes one for its scheduler
    pool: Any = redis.ConnectionPool.from_url(broker.url)
    with tokenyard.broker.direct.DirectRedis(connection_pool=pool) as client:
        # I expect commands and scripts to work.
        assert client.ping()
        assert client.register_script("return 1")() == 1
    pool.disconnect()


def test_an_error_is_raised_and_the_connection_stays_good(direct: redis.Redis) -> None:
    name, before = random_name("key"), direct.client_id()
    direct.set(name, "text", ex=60)

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        direct.lpush(name, "one")

    assert (direct.get(name), direct.client_id()) == (b"text", before)


def test_commands_sent_in_one_go_have_their_answers_in_order(direct: redis.Redis) -> None:
    name, before = random_name("key"), direct.client_id()
    commands = [("RPUSH", name, "one"), *[("ECHO", f"{at}" * 9000) for at in range(50)]]

    answers = ask_all(direct, [*commands, ("LRANGE", name, 0, -1), ("DEL", name)])

    assert answers == [1, *[f"{at}".encode() * 9000 for at in range(50)], [b"one"], 1]
    assert ask_all(direct, []) == []
    assert direct.client_id() == before


def test_the_first_error_of_commands_sent_in_one_go_is_raised(direct: redis.Redis) -> None:
    name, before = random_name("key"), direct.client_id()
    commands = [("SET", name, "x", "EX", 60), ("LPUSH", name, "y"), ("NO",), ("GET", name)]

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        ask_all(direct, commands)

    # I expect no answer of those to be left.
    assert (direct.get(name), direct.client_id()) == (b"x", before)


def test_commands_sent_in_one_go_over_a_pool_that_is_not_ours(broker: Server) -> None:
    with redis.Redis.from_url(broker.url) as client:
        assert ask_all(client, [("ECHO", "1"), ("ECHO", 2)]) == [b"1", b"2"]
        with pytest.raises(redis.ResponseError):
            ask_all(client, [("NO",), ("ECHO", 2)])
        assert client.ping()


@pytest.mark.parametrize("bad", ["\ud800", None, object()])
def test_words_that_cannot_be_sent_take_no_connection_with_them(
    direct: redis.Redis, bad: Any
) -> None:
    before = direct.client_id()

    with pytest.raises((UnicodeEncodeError, redis.DataError)):
        direct.echo(bad)

    assert direct.client_id() == before


def test_an_answer_that_comes_late_is_not_the_next_ones(
    direct: redis.Redis, connection: redis.Redis, fake_clock: FakeClock
) -> None:
    """Given an answer that took too long / If it comes after all / I expect nobody to read it."""
    name = random_name("key")
    hasty = direct.take()
    hasty._sock.settimeout(0.1)
    direct.give_back(hasty)
    with pytest.raises(redis.TimeoutError):
        direct.execute_command("BLPOP", name, 0)
    connection.rpush(name, "late")

    assert direct.echo("next") == b"next"


def test_an_interrupted_read_leaves_no_answer_behind(
    direct: redis.Redis, connection: redis.Redis, fake_clock: FakeClock
) -> None:
    """Given a read that a signal handler ends / I expect the next command to have its own."""
    name, reading = random_name("key"), direct.client_id()

    def interrupt() -> None:
        eventually(lambda: is_blocked(connection, reading))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, _interrupt)
    try:
        with ThreadPoolExecutor(1) as pool:
            interrupting = pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                direct.execute_command("BLPOP", name, 0)
            interrupting.result()
    finally:
        signal.signal(signal.SIGALRM, previous)
    connection.rpush(name, "late")

    assert direct.echo("next") == b"next"


def test_an_answer_is_read_as_by_redis_py(direct: redis.Redis, connection: redis.Redis) -> None:
    """Given commands with and without options of redis-py, I expect what redis-py makes of them."""
    stream, ranks = random_name("key"), random_name("key")
    direct.xadd(stream, {"name": "value"})
    direct.zadd(ranks, {"first": 1.5})

    for one in (direct, connection):
        [[name, [(_, fields)]]] = one.xread({stream: "0"})
        assert (name, fields) == (stream.encode(), {b"name": b"value"})
        assert one.zrange(ranks, 0, -1, withscores=True) == [(b"first", 1.5)]
    direct.delete(stream, ranks)


def test_a_broken_connection_is_an_error_once(
    direct: redis.Redis, connection: redis.Redis, fake_clock: FakeClock
) -> None:
    cut(connection, direct.client_id())

    with pytest.raises(redis.ConnectionError):
        direct.ping()

    assert direct.ping()


def test_where_retries_are_allowed_a_broken_connection_is_not_noticed(
    broker: Server, connection: redis.Redis
) -> None:
    with open_connection(broker.url, retries=1) as direct:
        cut(connection, direct.client_id())

        assert direct.ping()


def test_a_connection_that_was_left_alone_is_looked_at_first(
    direct: redis.Redis, connection: redis.Redis, fake_clock: FakeClock
) -> None:
    cut(connection, direct.client_id())
    fake_clock.advance(tokenyard.broker.direct.FRESH_S + 1)

    assert direct.ping()


def test_a_forked_process_has_a_connection_of_its_own(direct: redis.Redis) -> None:
    before = direct.client_id()
    ear, hand = os.pipe()
    child = os.fork()
    if not child:
        os.write(hand, b"%d" % direct.client_id())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    other = int(os.read(ear, 100))
    os.close(ear)
    os.close(hand)

    assert status == 0
    assert other != before
    assert direct.client_id() == before


def test_closing_ends_all_connections(broker: Server, connection: redis.Redis) -> None:
    direct = open_connection(broker.url)
    before = direct.client_id()

    direct.close()

    eventually(lambda: str(before) not in {one["id"] for one in connection.client_list()})


def test_an_untested_version_of_redis_py_runs_as_its_own_client(
    direct: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenyard.broker.direct, "_IS_SUPPORTED", False)
    monkeypatch.setattr(tokenyard.broker.direct, "_talk", None)  # would raise if it were called

    assert direct.echo("text") == b"text"
