"""requeue.lua: a dead letter's request runs again under its id."""

from __future__ import annotations

import pytest

from tests.support.builders import framed, make_request, make_result
from tests.support.yard import PlayedYard
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.errors import Code, reused
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import Assignment, Request, pack_tokens
from tokenyard.scripts.answers import Publication, Published
from tokenyard.scripts.client import requeue


def die(yard: PlayedYard, request: Request) -> Assignment:
    """Let a request publish a token and fail after a crash; its last attempt."""
    worker = yard.worker()
    assignment = yard.assign(worker, request, alone=True)
    yard.emit(worker, assignment, [7])
    yard.scripts.retire(worker, "crashed", "signal 11")
    yard.rescue(worker)
    waiting = yard.waiting(request)
    yard.answer(waiting, Code.POISONED, published=pack_tokens([7]), dead="POISONED")
    return assignment


def letters(yard: PlayedYard) -> list[str]:
    return [entry.decode() for entry, _ in yard.connection.xrange(yard.keys.dead)]


def again(yard: PlayedYard, letter: str, request: Request) -> str:
    return yard.scripts.call(requeue(yard.keys, letter, request.client, request.id, "low"))


@pytest.mark.parametrize("kind", [make_request, framed])
def test_requeued_letter_waits_like_a_new_request(yard: PlayedYard, kind) -> None:
    request = kind(stream=True, model="adder")
    first = die(yard, request)
    (letter,) = letters(yard)

    sid = again(yard, letter, request)

    ((entry, fields),) = yard.intake("low")
    assert sid == f"low/{entry}" != first.sid
    assert parse_request(fields) == request
    assert not any(name.startswith(b"dead_") for name in fields)
    assert letters(yard) == []
    assert yard.ledger(request) == {
        "state": "waiting",
        "sid": sid,
        "attempt": "1",
        "digest": request_digest(request),
    }
    assert yard.queued_tokens() > 0
    assert yard.ttl_s(yard.keys.ledger(request.client, request.id)) == -1


def test_new_life_begins_without_the_old_ones_tokens_and_crashes(
    yard: PlayedYard, worker: str
) -> None:
    request = make_request(stream=True)
    first = die(yard, request)
    again(yard, letters(yard)[0], request)

    second = yard.place(yard.waiting(request, "low"), worker)

    assert (second.attempt, second.crashes, second.published) == (first.attempt + 1, 0, b"")
    done = Publication(second, make_result(request.id, [1]))
    assert yard.scripts.finish(worker, [done]) == [Published.PUBLISHED]
    assert yard.replies(request) == [done.reply]


@pytest.mark.parametrize("state", ["waiting", "assigned"])
def test_id_in_flight_is_not_requeued(yard: PlayedYard, state: str) -> None:
    request = make_request()
    die(yard, request)
    (letter,) = letters(yard)
    yard.connection.delete(yard.keys.ledger("anon", request.id))  # its result has expired
    waiting = yard.submit(request)
    if state == "assigned":
        yard.place(waiting, yard.worker())
    before = yard.ledger(request)

    assert again(yard, letter, request) == ""
    assert letters(yard) == [letter]
    assert yard.ledger(request) == before


def test_missing_letter_is_not_requeued(yard: PlayedYard) -> None:
    request = make_request()
    die(yard, request)
    (letter,) = letters(yard)
    assert again(yard, letter, request)

    assert again(yard, letter, request) == ""
    assert again(yard, "1-1", make_request()) == ""
    assert len(yard.intake("low")) == 1


def test_letter_whose_result_has_expired_is_requeued(yard: PlayedYard) -> None:
    request = make_request()
    die(yard, request)
    yard.connection.delete(yard.keys.ledger("anon", request.id))

    assert again(yard, letters(yard)[0], request)
    assert yard.ledger(request)["attempt"] == "0"


def test_letter_is_requeued_on_a_server_without_memory(yard: PlayedYard) -> None:
    """A server refuses no further write of a script, and the letter is already deleted."""
    request = make_request()
    die(yard, request)
    (letter,) = letters(yard)

    with yard.without_memory():
        assert again(yard, letter, request)

    assert letters(yard) == []
    assert len(yard.intake("low")) == 1


def test_letter_that_reused_an_id_does_not_replace_the_first_request(
    yard: PlayedYard, worker: str
) -> None:
    """Given a result, I expect a letter that reused its id to wait until the result expires."""
    request = make_request()
    assignment = yard.assign(worker, request)
    yard.finish(worker, assignment)
    pushed = yard.push({"id": request.id, "prompt": "another"})
    yard.scripts.bury(yard.token, "normal", pushed.entry, reused(request.id))
    before = yard.ledger(request)

    assert again(yard, letters(yard)[0], request) == ""
    assert (yard.ledger(request), len(letters(yard))) == (before, 1)

    yard.connection.delete(yard.keys.ledger(request.client, request.id))
    assert again(yard, letters(yard)[0], request)
