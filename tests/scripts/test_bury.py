"""bury.lua: unanswerable entries go whole to the dead letters."""

from __future__ import annotations

from tests.support.yard import PlayedYard
from tokenyard.scripts.answers import Answered


def test_entry_moves_to_the_dead_letters_with_the_reason(yard: PlayedYard) -> None:
    entry = yard.push({b"prompt": b"\xff\0", b"\xfe": b""}).entry

    assert yard.scripts.bury(yard.token, "normal", entry, "id: is missing") is Answered.DONE

    ((_, fields),) = yard.connection.xrange(yard.keys.dead)
    assert fields == {
        b"dead_reason": b"id: is missing",
        b"dead_sid": f"normal/{entry}".encode(),
        b"prompt": b"\xff\0",
        b"\xfe": b"",
    }
    assert yard.intake() == []


def test_entry_of_thousands_of_fields_keeps_its_beginning(yard: PlayedYard) -> None:
    entry = yard.push({f"field-{i}": "x" for i in range(20_000)}).entry

    assert yard.scripts.bury(yard.token, "normal", entry, "x") is Answered.DONE

    ((_, fields),) = yard.connection.xrange(yard.keys.dead)
    assert fields[b"field-0"] == b"x"
    assert 50 < len(fields) < 200
