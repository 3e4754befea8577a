"""The reader of the control stream, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.control import Command, DesiredState, Order
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts
from worker.host.commands import CommandReader
from worker.process.stream_reader import COUNT


@pytest.fixture
def taken() -> list[tuple[str, Command | Order]]:
    return []


@pytest.fixture
def returns() -> list[str]:
    return []


@pytest.fixture
def reader(
    broker: Server, keys: Keys, taken: list[tuple[str, Command | Order]], returns: list[str]
) -> Iterator[CommandReader]:
    own = open_connection(broker.url, timeout_s=30.0, retries=0)

    def put(one: tuple[str, Command | Order] | None) -> None:
        if one is None:
            returns.append("now")
        else:
            taken.append(one)

    made = CommandReader(Yard(own, keys), put, block_ms=100)
    yield made
    made.stop()
    if made._thread.is_alive():
        made._thread.join(30.0)
    own.close()


def command(scripts: Scripts, model: str) -> tuple[str, Command]:
    """Give a command; return its entry and the command."""
    given = Command(verb="load", worker="w.1", model=model)
    entry = scripts.command(given)
    assert entry
    return entry, given


def test_each_command_comes_once_and_in_order(
    scripts: Scripts, reader: CommandReader, taken: list[tuple[str, Command | Order]]
) -> None:
    reader.start()
    given = [command(scripts, f"model-{number}") for number in range(5)]
    eventually(lambda: taken == given)

    given.append(command(scripts, "last"))

    eventually(lambda: taken == given)


def test_commands_before_the_first_read_are_not_missed(
    scripts: Scripts, reader: CommandReader, taken: list[tuple[str, Command | Order]]
) -> None:
    # The worker may have joined before the reader could reach the server.
    given = command(scripts, "model")

    reader.run_once()

    assert taken == [given]


def test_more_commands_than_one_read_returns_all_arrive(
    scripts: Scripts, reader: CommandReader, taken: list[tuple[str, Command | Order]]
) -> None:
    given = [command(scripts, f"model-{number}") for number in range(COUNT + 1)]

    reader.run_once()
    assert taken == given[:COUNT]
    reader.run_once()
    assert taken == given


def test_signals_arrive_between_commands(
    scripts: Scripts, reader: CommandReader, taken: list[tuple[str, Command | Order]]
) -> None:
    order = Order(signal="PAUSE", mode="keep")
    given = [command(scripts, "first")]
    entry = scripts.signal(order, b"", DesiredState(run_state="PAUSED", mode="keep"))
    assert entry
    given += [(entry, order), command(scripts, "last")]

    reader.run_once()

    assert taken == given


def test_an_invalid_command_is_skipped(
    connection: redis.Redis,
    keys: Keys,
    scripts: Scripts,
    reader: CommandReader,
    taken: list[tuple[str, Command | Order]],
) -> None:
    for forged in (
        {"x": "y"},
        {"command": "{"},
        {"signal": "{"},
        {"command": '{"verb": "explode", "worker": "w"}'},
    ):
        connection.xadd(keys.control, forged)
    given = command(scripts, "model")
    reader.start()

    eventually(lambda: taken == [given])


def test_the_reader_continues_after_its_connection_was_killed(
    connection: redis.Redis,
    scripts: Scripts,
    reader: CommandReader,
    taken: list[tuple[str, Command | Order]],
    returns: list[str],
) -> None:
    reader.start()
    given = [command(scripts, "first")]
    eventually(lambda: taken == given)
    connection.client_kill_filter(_type="normal", skipme=True)

    given.append(command(scripts, "second"))

    eventually(lambda: taken == given)
    eventually(lambda: returns == ["now"])


def test_stop_ends_the_reader(
    scripts: Scripts, reader: CommandReader, taken: list[tuple[str, Command | Order]]
) -> None:
    reader.start()
    reader.stop()
    reader.stop()
    reader._thread.join(30.0)
    command(scripts, "model")

    assert not reader._thread.is_alive()
    assert taken == []
