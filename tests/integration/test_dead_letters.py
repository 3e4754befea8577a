"""Many dead letters at once: filtered, requeued and dropped, with what was not done and why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.builders import make_request
from tests.support.letters import bury, left
from tests.support.yard import PlayedYard
from tokenyard.ops.letters import GONE, NO_CLIENT, change_letters, drop_letters, requeue_letters
from tokenyard.yard import letters
from tokenyard.yard.letters import (
    NO_CODE,
    LetterFilter,
    all_heads,
    count_letters,
    named_heads,
    read_page,
)

pytestmark = pytest.mark.valkey_only
YEAR_2026_MS = 1_767_225_600_000


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, ["d", "c", "b", "a"]),
        ({"code": "POISONED"}, ["c", "a"]),
        ({"code": NO_CODE}, ["d"]),
        ({"model": "adder"}, ["a"]),
        ({"client": "bob"}, ["b"]),
        ({"tenant": "lab"}, ["c"]),
        ({"text": "SEGV"}, ["c"]),
        ({"text": "segv", "client": "bob"}, []),
        ({"until_ms": YEAR_2026_MS}, []),
        ({"since_ms": YEAR_2026_MS}, ["d", "c", "b", "a"]),
    ],
)
def test_letters_are_filtered(yard: PlayedYard, wanted: dict[str, Any], found: list[str]) -> None:
    bury(yard, make_request("a", client="ann", model="adder"))
    bury(yard, make_request("b", client="bob"), "INFERENCE_ERROR: no memory")
    bury(yard, make_request("c", client="ann", tenant="lab"), "POISONED: ended by SIGSEGV")
    bury(yard, make_request("d", client="ann"), "it died")
    fitting = LetterFilter(**wanted)
    heads = read_page(yard, fitting).heads
    assert [head.id for head in heads] == found
    counted = count_letters(yard, fitting, left(yard)[-1], 60.0)
    assert (counted.count, [head.id for head in counted.first]) == (len(found), found[::-1])


def test_what_cannot_run_again_has_a_reason(yard: PlayedYard) -> None:
    waits, fine, runs = make_request("waits"), make_request("fine"), make_request("runs")
    letters = [bury(yard, each) for each in (waits, fine, runs)]
    other = make_request("other")
    letters.append(bury(yard, other, "ID_REUSED: the id 'other' is known with another request"))
    letters.append(yard.connection.xadd(yard.keys.dead, {"dead_reason": "id: is missing"}).decode())
    yard.submit(waits)
    yard.assign(yard.worker(), runs)
    yard.connection.hset(yard.keys.ledger(other.client, other.id), "state", "completed")

    changed = change_letters(yard, named_heads(yard, [*letters, "1-1"]), requeue_letters)

    assert changed.done == 1
    assert changed.problems == {
        GONE: 1,
        "its request waits already": 1,
        "its request runs already": 1,
        "its id belongs to another request": 1,
        NO_CLIENT: 1,
    }
    assert left(yard) == [letters[0], *letters[2:]] == changed.examples


def test_a_letter_that_disappears_meanwhile_was_gone(yard: PlayedYard) -> None:
    bury(yard)
    heads = read_page(yard, LetterFilter()).heads
    yard.connection.delete(yard.keys.dead)
    assert requeue_letters(yard, heads) == {heads[0].letter: GONE}
    assert drop_letters(yard, heads) == {heads[0].letter: GONE}


def test_pieces_of_long_letters_are_small(
    yard: PlayedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letters, "_PIECE_BYTES", 100_000)
    for number in range(60):
        bury(yard, make_request(f"q{number}", prompt="x" * 20_000))
    pieces: list[int] = []

    def drop(yard: Any, heads: Any) -> dict[str, str]:
        pieces.append(len(heads))
        return drop_letters(yard, heads)

    last = left(yard)[-1]
    found = all_heads(yard, LetterFilter(), last)
    changed = change_letters(yard, ([(one.letter, one) for one in each] for each in found), drop)

    assert (changed.done, left(yard)) == (60, [])
    # Twenty, and then less than five at a time.
    assert pieces[0] == 20
    assert max(pieces[1:]) < 5
