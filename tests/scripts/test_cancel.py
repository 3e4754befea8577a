"""cancel.lua: a request ends with one immediate result in any state, and its worker is told."""

from __future__ import annotations

import json

import pytest

from tests.scripts.test_hostile_ledgers import NOWHERE
from tests.support.builders import framed, framed_elsewhere, make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import DEFAULT_RESULT_TTL_S, Request, pack_tokens, request_fields
from tokenyard.scripts.answers import Cancelled, Dispatched, Published, Submitted
from tokenyard.scripts.calls import Call, destination
from tokenyard.scripts.client import cancel

KINDS = [make_request, framed, framed_elsewhere]
REASON = "changed my mind"


def stop(yard: PlayedYard, request: Request) -> Cancelled:
    return yard.scripts.cancel(request.client, request.id, REASON)


def seen_in_an_intake(yard: PlayedYard, request: Request, entry: str) -> Call[Cancelled]:
    """Cancel as a caller that saw an entry in an intake, and no ledger."""
    return cancel(
        yard.keys,
        request.client,
        request.id,
        state="",
        where="normal",
        entry=entry,
        reason=REASON,
    )


def only_result(yard: PlayedYard, request: Request) -> Reply:
    """Check for the same single result in ledger and reply stream; return it."""
    replies = yard.replies(request)
    results = [reply for reply in replies if reply.event == "result"]
    assert results == replies[-1:] == [yard.result(request)]
    assert results[0].status == yard.ledger(request)["state"] == "cancelled"
    assert json.loads(results[0].error) == {"code": Code.CANCELLED, "message": REASON}
    return results[0]


@pytest.mark.parametrize("kind", KINDS)
def test_cancel_of_a_waiting_request_answers_immediately(yard: PlayedYard, kind) -> None:
    request = kind(result_ttl_s=10_000)
    yard.submit(request)

    assert stop(yard, request) is Cancelled.CANCELLED

    result = only_result(yard, request)
    assert (result.seq, result.tokens) == (0, b"")
    assert yard.intake() == []
    assert yard.queued_tokens() == 0
    stream, _ = destination(yard.keys, request)
    for key in (stream, yard.keys.ledger(request.client, request.id)):
        assert yard.lives_for(key, 10_000)


@pytest.mark.parametrize("kind", KINDS)
def test_running_request_ends_with_its_published_tokens(
    yard: PlayedYard, worker: str, kind
) -> None:
    request = kind(stream=True)
    neighbour, assignment = yard.assign(worker), yard.assign(worker, request)
    yard.emit(worker, assignment, [7, 0])

    assert stop(yard, request) is Cancelled.CANCELLED

    result = only_result(yard, request)
    assert (result.seq, result.tokens) == (2, pack_tokens([7, 0]))
    assert yard.lane(worker) == [neighbour]
    assert yard.told_to_cancel(worker) == [assignment.entry]
    assert yard.published(request) == b""


def test_rescued_request_ends_with_its_published_tokens(yard: PlayedYard, worker: str) -> None:
    request = make_request(stream=True)
    assignment = yard.assign(worker, request)
    yard.emit(worker, assignment, [7])
    yard.lose(worker)

    assert stop(yard, request) is Cancelled.CANCELLED

    assert only_result(yard, request).tokens == pack_tokens([7])
    assert yard.intake("retry") == []


def test_cancelled_request_of_a_lost_worker_is_not_rescued(yard: PlayedYard, worker: str) -> None:
    """Given a worker that died unnoticed, I expect its lane to end despite the cancel entry."""
    request = make_request()
    yard.assign(worker, request)
    yard.expire(worker)
    stop(yard, request)
    lane = yard.keys.lane(worker)
    held = [(entry.decode(), "anon", "") for entry, _ in yard.connection.xrange(lane)]

    assert yard.scripts.rescue(yard.token, worker, held) == 0

    assert yard.intake("retry") == []
    assert yard.ledger(request)["state"] == "cancelled"


@pytest.mark.parametrize("state", ["completed", "cancelled"])
def test_ended_request_is_unchanged(yard: PlayedYard, worker: str, state: str) -> None:
    request = make_request()
    assignment = yard.assign(worker, request)
    if state == "completed":
        yard.finish(worker, assignment, [1])
    else:
        stop(yard, request)
    before = yard.replies(request), yard.ledger(request), yard.told_to_cancel(worker)

    assert stop(yard, request) is Cancelled.OVER
    assert (yard.replies(request), yard.ledger(request), yard.told_to_cancel(worker)) == before


@pytest.mark.parametrize("seen", ["other intake", "still waiting", "other worker", "unknown"])
def test_an_outdated_read_of_the_ledger_cancels_nothing(
    yard: PlayedYard, worker: str, waiting: QueuedRequest, seen: str
) -> None:
    """Given a request that moved between read and call, I expect MOVED."""
    request = waiting.request
    state, where = {
        "other intake": ("waiting", "high"),
        "still waiting": ("waiting", "normal"),
        "other worker": ("assigned", "w.9"),
        "unknown": ("", ""),
    }[seen]
    if seen in ("still waiting", "other worker"):
        yard.place(waiting, worker)
    before = yard.ledger(request)

    call = cancel(yard.keys, request.client, request.id, state=state, where=where)

    assert yard.scripts.call(call) is Cancelled.MOVED
    assert yard.ledger(request) == before
    assert yard.replies(request) == []
    assert len(yard.intake()) + len(yard.lane(worker)) == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_plain_entry_without_a_ledger_is_cancelled_before_arrival(
    yard: PlayedYard, worker: str, is_there: bool
) -> None:
    """Given an XADD that arrives after its cancel, or is unread, I expect it to be dropped."""
    request = make_request()
    early = yard.push(request_fields(request), request) if is_there else None

    assert stop(yard, request) is Cancelled.CANCELLED_BEFORE_ARRIVAL

    result = only_result(yard, request)
    assert (result.seq, result.tokens) == (0, b"")
    pushed = early or yard.push(request_fields(request), request)
    assert yard.scripts.dispatch(yard.token, [pushed.to(worker)]) == [Dispatched.DUPLICATE]
    assert yard.intake() == []
    assert only_result(yard, request) == result
    assert yard.scripts.submit("normal", [request])[0].code is Submitted.KNOWN
    assert stop(yard, request) is Cancelled.OVER
    for key in (yard.keys.reply("anon", request.id), yard.keys.ledger("anon", request.id)):
        assert yard.lives_for(key, DEFAULT_RESULT_TTL_S)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_entry_is_cancelled_where_it_was_seen(yard: PlayedYard, worker: str, kind) -> None:
    """Given an undispatched XADD, I expect its result on its reply stream."""
    request = kind(result_ttl_s=10_000)
    pushed = yard.push(request_fields(request), request)
    call = seen_in_an_intake(yard, request, pushed.entry)

    assert yard.scripts.call(call) is Cancelled.CANCELLED

    only_result(yard, request)
    ledger = yard.keys.ledger(request.client, request.id)
    assert yard.lives_for(ledger, 10_000)
    assert yard.ledger(request)["sid"] == f"normal/{pushed.entry}"
    assert yard.intake() == []
    assert yard.scripts.dispatch(yard.token, [pushed.to(worker)]) == [Dispatched.GONE]
    assert yard.scripts.call(call) is Cancelled.OVER


def test_plain_entry_that_has_left_the_intake_is_reported_as_moved(
    yard: PlayedYard, worker: str
) -> None:
    request = make_request()
    pushed = yard.push(request_fields(request), request)
    yard.place(pushed, worker)
    assigned = seen_in_an_intake(yard, request, pushed.entry)
    assert yard.scripts.call(assigned) is Cancelled.MOVED
    assert yard.ledger(request)["state"] == "assigned"

    gone = seen_in_an_intake(yard, make_request(), pushed.entry)
    assert yard.scripts.call(gone) is Cancelled.MOVED


def test_cancel_on_another_lane_does_not_end_a_quarantine(yard: PlayedYard) -> None:
    one, two = yard.worker(), yard.worker()
    suspect, other = yard.assign(one, alone=True), yard.assign(two)

    stop(yard, other.request)

    assert yard.alone(one) == suspect.entry


@pytest.mark.parametrize("ttl", ["", "-5", "0", "1e9", "abc", "99999999999999999999"])
def test_entry_with_an_invalid_result_ttl_is_cancelled(
    yard: PlayedYard, waiting: QueuedRequest, ttl: str
) -> None:
    """Given unvalidated fields, I expect the result to have the default TTL."""
    request = waiting.request
    foreign = yard.push({"id": request.id, "prompt": "x", "result_ttl": ttl})
    ledger = yard.keys.ledger("anon", request.id)
    yard.connection.hset(ledger, "entry", foreign.entry)

    assert stop(yard, request) is Cancelled.CANCELLED

    only_result(yard, request)
    assert yard.lives_for(ledger, DEFAULT_RESULT_TTL_S)


class TestLedgersThatAClientWrote:
    """With the users of deploy/ a client may write the ledgers of its own requests."""

    def forge(self, yard: PlayedYard, **fields: str | bytes) -> Request:
        """A request whose client has forged its ledger."""
        request = make_request(client="mallory")
        yard.connection.hset(yard.keys.ledger("mallory", request.id), mapping=fields)
        return request

    def test_request_with_an_empty_intake_is_cancelled(self, yard: PlayedYard) -> None:
        # The leader retried such a requested cancel without a pause.
        mine = self.forge(yard, state="waiting", sid="normal/1-1", intake="")

        assert stop(yard, mine) is Cancelled.CANCELLED

    @pytest.mark.parametrize("kind", KINDS)
    def test_waiting_request_of_another_client_is_unchanged(self, yard: PlayedYard, kind) -> None:
        theirs = yard.submit(kind(client="framed"))
        tokens = yard.queued_tokens()

        mine = self.forge(yard, state="waiting", sid=f"normal/{theirs.entry}")

        assert stop(yard, mine) is Cancelled.CANCELLED
        assert [entry for entry, _ in yard.intake()] == [theirs.entry]
        assert yard.queued_tokens() == tokens
        assert yard.result(mine) is not None
        assert yard.result(theirs.request) is None

    def test_running_request_of_another_client_is_unchanged(
        self, yard: PlayedYard, worker: str
    ) -> None:
        theirs = yard.assign(worker, make_request(), alone=True)

        mine = self.forge(yard, state="assigned", worker=worker, entry=theirs.entry)

        assert stop(yard, mine) is Cancelled.CANCELLED
        assert [one.entry for one in yard.lane(worker)] == [theirs.entry]
        assert yard.told_to_cancel(worker) == []
        assert yard.alone(worker) == theirs.entry
        assert yard.finish(worker, theirs, [1]) is Published.PUBLISHED

    def test_entry_of_another_client_without_a_ledger_is_unchanged(self, yard: PlayedYard) -> None:
        theirs = make_request()
        entry = yard.push(request_fields(theirs), theirs).entry
        mine = make_request(client="mallory")

        assert yard.scripts.call(seen_in_an_intake(yard, mine, entry)) is Cancelled.MOVED
        assert len(yard.intake()) == 1

    @pytest.mark.parametrize("fields", NOWHERE)
    def test_request_whose_ledger_names_no_place_is_cancelled(
        self, yard: PlayedYard, fields
    ) -> None:
        mine = self.forge(yard, **fields)
        yard.submit()

        assert stop(yard, mine) is Cancelled.CANCELLED
        assert len(yard.intake()) == 1
        result = yard.result(mine)
        assert result.status == "cancelled"


def test_cancel_of_a_suspect_with_a_deleted_entry_opens_its_lane(
    yard: PlayedYard, worker: str
) -> None:
    assignment = yard.assign(worker, alone=True)
    yard.connection.delete(yard.keys.lane(worker))

    assert stop(yard, assignment.request) is Cancelled.CANCELLED
    assert yard.alone(worker) is None
    assert yard.told_to_cancel(worker) == []
