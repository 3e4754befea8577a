"""command.lua and acknowledge.lua: commands to workers, and their acknowledgements."""

from __future__ import annotations

import pytest

from tests.support.yard import PlayedYard
from tokenyard.protocol.control import (
    Acknowledgement,
    Command,
    decode_acknowledgement,
    parse_command,
)
from tokenyard.scripts.calls import LostLeadership

LOAD = Command(verb="load", worker="w.1", model="adder", why="the test says so")


def commands(yard: PlayedYard) -> list[tuple[str, Command | None]]:
    """The entries of the control stream, as a controller reads them."""
    entries = yard.connection.xrange(yard.keys.control)
    return [(entry.decode(), parse_command(fields)) for entry, fields in entries]


@pytest.mark.parametrize("is_leader", [True, False])
def test_the_leader_commands_by_its_token_and_an_operator_without(
    yard: PlayedYard, is_leader: bool
) -> None:
    if not is_leader:
        yard.depose()

    command = yard.scripts.command(LOAD, yard.token if is_leader else "")

    assert commands(yard) == [(command, LOAD)]


def test_without_a_leader_no_token_is_valid(yard: PlayedYard) -> None:
    yard.scripts.resign(yard.token)

    with pytest.raises(LostLeadership):
        yard.scripts.command(LOAD, yard.token)


def test_an_acknowledgement_wakes_the_leader_and_expires(yard: PlayedYard) -> None:
    command = yard.scripts.command(LOAD, yard.token)
    assert command
    refused = Acknowledgement(worker="w.1", done=False, reason="no such model")

    yard.scripts.acknowledge(command, refused)

    acks = yard.connection.hgetall(yard.keys.acks(command))
    assert {worker: decode_acknowledgement(packed) for worker, packed in acks.items()} == {
        b"w.1": refused
    }
    assert 3_500 < yard.ttl_s(yard.keys.acks(command)) <= 3_600
    assert yard.events()[-1] == {b"event": b"command", b"worker": b"w.1"}


def test_acknowledgements_are_per_worker_and_repeatable(yard: PlayedYard) -> None:
    done = Acknowledgement(worker="w.1", done=True)
    other = Acknowledgement(worker="w.2", done=True)

    for one in (done, other, done):
        yard.scripts.acknowledge("1-0", one)

    assert set(yard.connection.hkeys(yard.keys.acks("1-0"))) == {b"w.1", b"w.2"}
    assert len(yard.events()) == 3
