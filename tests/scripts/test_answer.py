"""answer.lua: a waiting request gets its result without running."""

from __future__ import annotations

import json

import pytest

from tests.support.builders import framed, make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.replies import refusal
from tokenyard.protocol.wire import Refused, pack_tokens, request_fields
from tokenyard.scripts.answers import Answered
from tokenyard.scripts.calls import destination


@pytest.mark.parametrize("kind", [make_request, framed])
@pytest.mark.parametrize("pushed", [True, False])
def test_waiting_request_gets_its_result(yard: PlayedYard, kind, pushed: bool) -> None:
    request = kind(result_ttl_s=10_000)
    fields = request_fields(request)
    waiting = yard.push(fields, request, "high") if pushed else yard.submit(request)

    assert yard.answer(waiting) is Answered.DONE

    (reply,) = yard.replies(request)
    assert (reply.status, reply.tokens) == ("failed", b"")
    assert yard.result(request) == reply
    ledger = yard.ledger(request)
    assert (ledger["state"], ledger["sid"]) == ("failed", f"{waiting.intake}/{waiting.entry}")
    assert yard.intake(waiting.intake) == []
    stream = (
        yard.keys.replies("framed") if request.reply_to else yard.keys.reply("anon", request.id)
    )
    for key in (stream, yard.keys.ledger(request.client, request.id)):
        assert yard.lives_for(key, 10_000)


def test_invalid_entry_with_an_id_gets_a_failed_result(yard: PlayedYard) -> None:
    refused = Refused("q1", "anon", "", Code.INVALID_REQUEST, "prompt: is empty")
    entry = yard.push({"id": "q1", "prompt": ""}).entry
    reply = refusal(refused, refused.code, refused.message)

    assert yard.scripts.answer(yard.token, "normal", entry, refused, reply) is Answered.DONE

    ((_, fields),) = yard.connection.xrange(yard.keys.reply("anon", "q1"))
    assert fields[b"error"] == b'{"code":"INVALID_REQUEST","message":"prompt: is empty"}'
    assert fields[b"status"] == b"failed"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.CANCELLED, "cancelled"),
        (Code.DEADLINE_EXCEEDED, "expired"),
        (Code.POISONED, "failed"),
    ],
)
def test_state_of_the_ledger_is_the_status(
    yard: PlayedYard, waiting: QueuedRequest, code: Code, status: str
) -> None:
    yard.answer(waiting, code)

    assert yard.ledger(waiting.request)["state"] == status


def test_request_on_a_lane_is_not_answered(yard: PlayedYard, waiting: QueuedRequest) -> None:
    yard.place(waiting, yard.worker())

    assert yard.answer(waiting) is Answered.GONE
    assert yard.ledger(waiting.request)["state"] == "assigned"


@pytest.mark.parametrize("state", ["waiting", "assigned", "completed", "failed"])
@pytest.mark.parametrize("intake", ["normal", "high"])
def test_invalid_second_entry_of_a_known_id_is_dropped_silently(
    yard: PlayedYard, worker: str, intake: IntakeClass, state: str
) -> None:
    """Given a running request, I expect an invalid duplicate not to fail it."""
    first = yard.submit()
    if state == "failed":
        yard.answer(first)
    elif state != "waiting":
        assignment = yard.place(first, worker)
        if state == "completed":
            yard.finish(worker, assignment)
    before = yard.ledger(first.request), yard.replies(first.request)
    twin = yard.push({"id": first.request.id}, first.request, intake=intake)

    assert yard.answer(twin) is Answered.DUPLICATE

    assert (yard.ledger(first.request), yard.replies(first.request)) == before
    assert twin.entry not in [entry for entry, _ in yard.intake(intake)]


def test_rescued_request_keeps_its_published_tokens(yard: PlayedYard, worker: str) -> None:
    request = make_request(stream=True)
    assignment = yard.assign(worker, request)
    yard.emit(worker, assignment, [1, 2])
    yard.lose(worker)
    again = yard.waiting(request)

    assert yard.answer(again, published=yard.published(request)) is Answered.DONE

    result = yard.replies(request)[-1]
    assert (result.seq, result.tokens) == (2, pack_tokens([1, 2]))
    assert yard.published(request) == b""
    assert yard.ledger(request)["sid"] == assignment.sid


def test_a_short_result_ttl_does_not_shorten_the_life_of_other_results(yard: PlayedYard) -> None:
    yard.answer(yard.submit(framed(client="ann", result_ttl_s=10_000)))
    yard.answer(yard.submit(framed(client="ann", result_ttl_s=10)))

    assert yard.lives_for(yard.keys.replies("ann"), 10_000)


def test_answer_with_a_reason_keeps_the_whole_request_among_the_dead_letters(
    yard: PlayedYard, worker: str
) -> None:
    """Given a retry that is given up, I expect the letter to have its history."""
    request = make_request(stream=True)
    assignment = yard.assign(worker, request)
    yard.emit(worker, assignment, [7])
    yard.scripts.retire(worker, "crashed", "signal 11")
    yard.rescue(worker)

    code = yard.answer(
        yard.waiting(request),
        Code.POISONED,
        published=pack_tokens([7]),
        dead="POISONED: signal 11",
    )

    assert code is Answered.DONE
    ((_, letter),) = yard.connection.xrange(yard.keys.dead)
    assert letter[b"dead_reason"] == b"POISONED: signal 11"
    assert letter[b"dead_sid"] == assignment.sid.encode()
    assert (letter[b"id"], letter[b"crashes"]) == (request.id.encode(), b"1")
    assert letter[b"published"] == pack_tokens([7])


@pytest.mark.parametrize("why_not", ["twin", "gone"])
def test_dead_letter_is_written_only_with_the_answer(
    yard: PlayedYard, waiting: QueuedRequest, why_not: str
) -> None:
    if why_not == "twin":
        waiting = yard.push(request_fields(waiting.request), waiting.request, intake="high")
    else:
        yard.connection.xdel(yard.keys.intake("normal"), waiting.entry)

    assert yard.answer(waiting, dead="x") is not Answered.DONE
    assert yard.connection.xlen(yard.keys.dead) == 0


def test_an_answered_plain_entry_leaves_its_digest_in_the_ledger(yard: PlayedYard) -> None:
    request = make_request()
    waiting = yard.push(request_fields(request), request)

    assert yard.answer(waiting, digest="abc") is Answered.DONE

    assert yard.ledger(request)["digest"] == "abc"


def test_another_request_under_a_known_id_is_a_dead_letter(yard: PlayedYard) -> None:
    """If another request under a known id is refused, I expect the first one's reply to stay."""
    request = make_request()
    yard.assign(yard.worker(), request)
    waiting = yard.push({**request_fields(request), "model": "no such"}, request)
    before = yard.ledger(request)

    assert yard.answer(waiting, digest="another") is Answered.REUSED

    assert yard.intake() == []
    assert yard.ledger(request) == before
    ((_, letter),) = yard.connection.xrange(yard.keys.dead)
    assert letter[b"dead_reason"].startswith(b"ID_REUSED: the id 'request-")
    assert letter[b"dead_sid"] == f"normal/{waiting.entry}".encode()
    assert letter[b"model"] == b"no such"


@pytest.mark.parametrize("kept", [True, False])
def test_who_reuses_an_id_is_told_on_its_reply_stream(yard: PlayedYard, kept: bool) -> None:
    # Given a request with a delta that was published, and perhaps deleted
    request = make_request(stream=True)
    worker = yard.worker()
    yard.emit(worker, yard.assign(worker, request), [5])
    stream, _ = destination(yard.keys, request)
    if not kept:
        yard.connection.delete(stream)
    lifetime_s = yard.ttl_s(stream)

    # If another of that id is refused,
    waiting = yard.push({**request_fields(request), "model": "no such"}, request)
    assert yard.answer(waiting, digest="another") is Answered.REUSED

    # I expect its submitter to be told by a delta without tokens, which other readers ignore.
    *_, told = yard.replies(request)
    assert (told.event, told.seq, told.tokens, told.status) == ("delta", 0, b"", None)
    assert json.loads(told.error or "") == {
        "code": "ID_REUSED",
        "message": f"the id {request.id!r} is known with another request",
    }
    assert yard.ttl_s(stream) == lifetime_s if kept else yard.ttl_s(stream) > 0


@pytest.mark.parametrize("again", ["same", ""])
def test_the_same_request_refused_twice_is_a_duplicate(yard: PlayedYard, again: str) -> None:
    request = make_request()
    for _ in range(2):
        waiting = yard.push(request_fields(request), request)
        last = yard.answer(waiting, digest=again if yard.replies(request) else "same")

    assert last is Answered.DUPLICATE
    assert yard.connection.xlen(yard.keys.dead) == 0
