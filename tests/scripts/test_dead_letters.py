"""Dead letters for an operator: listed, shown, requeued, dropped."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.yard import Yard
from tokenyard.admin.dead_letters import (
    DeadLetter,
    all_letters,
    dead_letters,
    drop_letter,
    find_letter,
    requeue_letter,
)
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.wire import Request
from tokenyard.scripts import Answered


def kill(yard: Yard, request: Request, *, priority_class: PriorityClass = "normal") -> DeadLetter:
    """Let a request end as a dead letter; the letter."""
    waiting = yard.submit(request, priority_class)
    assert yard.answer(waiting, Code.POISONED, dead="it killed its worker") is Answered.DONE
    return dead_letters(yard.connection, yard.keys)[0]


def bury(yard: Yard, **fields: str | bytes) -> DeadLetter:
    """Bury an unanswerable entry; its letter."""
    entry = yard.push(dict(fields)).entry
    yard.scripts.bury(yard.token, "normal", entry, "id: is missing")
    return dead_letters(yard.connection, yard.keys)[0]


def test_a_letter_has_client_and_reason(yard: Yard) -> None:
    request = make_request("q", client="ann", model="adder", tokens=[1, 300])
    letter = kill(yard, request, priority_class="high")

    assert (letter.client, letter.id, letter.model) == ("ann", "q", "adder")
    assert (letter.reason, letter.priority_class) == ("it killed its worker", "high")
    assert letter.fields["tokens"] == "1,300"
    assert "dead_reason" not in letter.fields
    seconds, _ = yard.connection.time()
    assert abs(letter.died_ms / 1000 - seconds) < 60


def test_an_unanswerable_dead_letter_is_shown(yard: Yard) -> None:
    letter = bury(yard, prompt=b"\xff\x00", tokens=b"[1]")

    assert not letter.is_answerable
    assert (letter.fields["prompt"], letter.fields["tokens"]) == ("ff00", "[1]")


def test_letters_are_listed_in_pages_newest_first(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenyard.admin.dead_letters._PAGE", 2)
    names = [kill(yard, make_request(f"q{number}")).letter for number in range(5)]

    assert [each.letter for each in dead_letters(yard.connection, yard.keys, 2)] == names[:2:-1]
    assert [each.letter for each in all_letters(yard.connection, yard.keys)] == names


def test_letters_newer_than_the_listing_are_left_out(yard: Yard) -> None:
    letter = kill(yard, make_request("q"))
    letters = all_letters(yard.connection, yard.keys)

    assert next(letters) == letter
    kill(yard, make_request("late"))
    assert list(letters) == []


def test_a_letter_is_found_by_its_name_or_its_requests_id(yard: Yard) -> None:
    first, _other = kill(yard, make_request("q")), kill(yard, make_request("p"))

    assert find_letter(yard.connection, yard.keys, first.letter) == first
    assert find_letter(yard.connection, yard.keys, "q") == first
    assert find_letter(yard.connection, yard.keys, "1-1") is None
    assert find_letter(yard.connection, yard.keys, "nobody") is None


def test_a_letter_is_requeued_in_its_class(yard: Yard) -> None:
    letter = kill(yard, make_request("q"), priority_class="low")

    sid = requeue_letter(yard.connection, yard.keys, letter)

    assert [f"low/{entry}" for entry, _ in yard.intake("low")] == [sid]
    assert dead_letters(yard.connection, yard.keys) == []


def test_an_unanswerable_dead_letter_cannot_be_requeued(yard: Yard) -> None:
    assert requeue_letter(yard.connection, yard.keys, bury(yard, prompt="x")) == ""
    assert len(dead_letters(yard.connection, yard.keys)) == 1


def test_a_letter_is_dropped_once_and_the_result_stays(yard: Yard) -> None:
    request = make_request("q")
    letter = kill(yard, request)

    assert drop_letter(yard.connection, yard.keys, letter)
    assert not drop_letter(yard.connection, yard.keys, letter)
    assert yard.result(request) is not None
