"""The reader of the control stream, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.control import Command, DesiredState, Order
from tokenyard.protocol.keys import Yard
from tokenyard.scripts import Scripts
from worker.host.commands import CommandReader
from worker.process.stream_reader import COUNT


class Rig:
    """A reader, what it has put, and those who command."""

    def __init__(self, scripts: Scripts, connection: redis.Redis) -> None:
        self.scripts = scripts
        self.taken: list[tuple[str, Command | Order]] = []
        self.returns = 0
        self.reader = CommandReader(Yard(connection, scripts.keys), self._put, block_ms=100)

    def _put(self, one: tuple[str, Command | Order] | None) -> None:
        if one is None:
            self.returns += 1
        else:
            self.taken.append(one)

    def command(self, model: str) -> tuple[str, Command | Order]:
        """Give a command; return its entry and the command."""
        given = Command(verb="load", worker="w.1", model=model)
        entry = self.scripts.command(given)
        assert entry
        return entry, given


@pytest.fixture
def rig(broker: Server, scripts: Scripts) -> Iterator[Rig]:
    with open_connection(broker.url, timeout_s=30.0, retries=0) as own:
        made = Rig(scripts, own)
        yield made
        made.reader.stop()
        if made.reader._thread.is_alive():
            made.reader._thread.join(30.0)


def test_more_commands_than_one_read_returns_all_arrive(rig: Rig) -> None:
    given = [rig.command(f"model-{number}") for number in range(COUNT + 1)]

    rig.reader.run_once()
    assert rig.taken == given[:COUNT]
    rig.reader.run_once()
    assert rig.taken == given


def test_signals_arrive_between_commands(rig: Rig) -> None:
    order = Order(signal="PAUSE", mode="keep")
    given = [rig.command("first")]
    entry = rig.scripts.signal(order, b"", DesiredState(run_state="PAUSED", mode="keep"))
    assert entry
    given += [(entry, order), rig.command("last")]

    rig.reader.run_once()

    assert rig.taken == given


def test_an_invalid_command_is_skipped(rig: Rig, connection: redis.Redis) -> None:
    for forged in (
        {"x": "y"},
        {"command": "{"},
        {"signal": "{"},
        {"command": '{"verb": "explode", "worker": "w"}'},
    ):
        connection.xadd(rig.scripts.keys.control, forged)
    given = rig.command("model")
    rig.reader.start()

    eventually(lambda: rig.taken == [given])


def test_the_reader_continues_after_its_connection_was_killed(
    rig: Rig, connection: redis.Redis
) -> None:
    rig.reader.start()
    given = [rig.command("first")]
    eventually(lambda: rig.taken == given)
    connection.client_kill_filter(_type="normal", skipme=True)

    given.append(rig.command("second"))

    eventually(lambda: rig.taken == given)
    eventually(lambda: rig.returns == 1)
