"""finish.lua: the first valid writer of a result is the only one."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.builders import framed, framed_elsewhere, make_delta, make_request, make_result
from tests.support.yard import PlayedYard
from tokenyard.protocol.wire import Assignment, Request
from tokenyard.scripts.answers import Publication, Published

KINDS = [make_request, framed, framed_elsewhere]


def result(assignment: Assignment, tokens: list[int] | None = None, **fields) -> Publication:
    return Publication(assignment, make_result(assignment.request.id, tokens or [], **fields))


@pytest.mark.parametrize("kind", KINDS)
def test_result_is_published_kept_and_frees_its_place(yard: PlayedYard, worker: str, kind) -> None:
    assignment = yard.assign(worker, kind(result_ttl_s=10_000))
    done = result(assignment, [1, 0], text="", usage='{"total_tokens":2}', finish_reason="stop")

    assert yard.scripts.finish(worker, [done]) == [Published.PUBLISHED]

    request = assignment.request
    assert yard.replies(request) == [done.reply]
    assert yard.result(request) == done.reply
    assert yard.ledger(request)["state"] == "completed"
    assert yard.lane(worker) == []
    assert yard.lives_for(yard.keys.ledger(request.client, request.id), 10_000)
    assert yard.freed()[-1] == {
        b"event": b"capacity",
        b"worker": worker.encode(),
        b"count": b"1",
        b"work": b"%d" % request.work,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_result_follows_the_deltas_and_deletes_their_tokens(
    yard: PlayedYard, worker: str, kind
) -> None:
    assignment = yard.assign(worker, kind(stream=True))
    delta = Publication(assignment, make_delta(assignment.request.id, 0, [1]))
    yard.scripts.emit(worker, [delta])
    done = result(assignment, [1, 2], seq=1)

    yard.scripts.finish(worker, [done])

    assert yard.replies(assignment.request) == [delta.reply, done.reply]
    assert yard.published(assignment.request) == b""


@pytest.mark.parametrize("is_read", [True, False])
def test_tokens_of_an_earlier_attempt_are_deleted(yard: PlayedYard, is_read: bool) -> None:
    """Given tokens published before a rescue, I expect the result to delete them.

    This also holds if the next worker cannot read the request and knows only client and id.
    """
    first, second = yard.worker(), yard.worker()
    request = make_request(stream=True)
    yard.emit(first, yard.assign(first, request), [1, 2])
    yard.lose(first)
    again = yard.place(yard.waiting(request), second)
    if not is_read:
        unread = Request(id=request.id, client=request.client)
        again = msgspec.structs.replace(again, request=unread, fault="params: of a newer version")
    seq = len(again.published) // 4

    yard.scripts.finish(second, [result(again, [1, 2], seq=seq, status="failed")])

    assert seq == 2
    assert not yard.connection.exists(yard.keys.tokens(request.client, request.id))


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "expired"])
def test_state_of_the_ledger_is_the_status_of_the_result(
    yard: PlayedYard, worker: str, assignment: Assignment, status
) -> None:
    yard.finish(worker, assignment, status=status)

    assert yard.ledger(assignment.request)["state"] == status


def test_step_without_results_wakes_no_leader(yard: PlayedYard, worker: str) -> None:
    before = yard.freed()

    assert yard.scripts.finish(worker, []) == []
    assert yard.freed() == before


def test_one_step_of_many_destinations_answers_in_the_order_given(
    yard: PlayedYard, worker: str
) -> None:
    ann = [yard.assign(worker, framed(client="ann")) for _ in range(2)]
    flat = [yard.assign(worker) for _ in range(2)]
    yard.scripts.finish(worker, [result(flat[1], [9])])
    step = [result(item) for item in (ann[0], flat[0], flat[1], ann[1])]

    codes = yard.scripts.finish(worker, step)

    assert codes == [1, 1, Published.REPEATED, 1]
    assert yard.connection.xlen(yard.keys.replies("ann")) == 1
    assert yard.replies(ann[0].request) == [step[0].reply, step[3].reply]
    assert yard.replies(flat[0].request) == [step[1].reply]
    assert yard.lane(worker) == []
    assert yard.freed()[-1][b"count"] == b"3"


def test_result_repeated_after_a_lost_answer_appears_once(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    first = result(assignment, [1])
    yard.scripts.finish(worker, [first])
    freed = yard.freed()

    assert yard.scripts.finish(worker, [result(assignment, [2])]) == [Published.REPEATED]
    assert yard.replies(assignment.request) == [first.reply]
    assert yard.result(assignment.request) == first.reply
    assert yard.freed() == freed


def test_request_twice_in_one_step_finishes_once(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    codes = yard.scripts.finish(worker, [result(assignment, [1]), result(assignment, [2])])

    assert codes == [Published.PUBLISHED, Published.REPEATED]
    assert len(yard.replies(assignment.request)) == 1


def test_wrong_attempt_leaves_the_workers_own_entry(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    wrong = Assignment(
        request=assignment.request, entry=assignment.entry, sid=assignment.sid, attempt=7
    )

    assert yard.scripts.finish(worker, [result(wrong)]) == [Published.STALE]
    assert yard.lane(worker) == [assignment]


def test_the_longest_result_ttl_keeps_a_shared_reply_stream(yard: PlayedYard, worker: str) -> None:
    stream = yard.keys.replies("ann")

    for ttl_s, expected in ((1_000, 1_000), (10_000, 10_000), (2_000, 10_000)):
        assignment = yard.assign(worker, framed(client="ann", result_ttl_s=ttl_s))
        yard.scripts.finish(worker, [result(assignment)])
        assert yard.lives_for(stream, expected)


@pytest.mark.long
def test_wide_step_is_published_in_one_call(yard: PlayedYard, worker: str) -> None:
    running = [yard.assign(worker, kind()) for _ in range(200) for kind in KINDS]

    codes = yard.scripts.finish(worker, [result(item, [1]) for item in running])

    assert codes == [Published.PUBLISHED] * len(running)
    assert yard.lane(worker) == []


def test_result_with_every_field_arrives_whole(yard: PlayedYard, worker: str) -> None:
    """Given more fields than a small msgpack map holds, I expect all of them, flat and framed."""
    names = ("logprobs", "finish_reason", "stop_reason", "usage", "error", "provenance", "timing")
    fields = dict.fromkeys((*names, "choices", "prompt_logprobs", "text"), "x" * 300)
    for kind in KINDS:
        assignment = yard.assign(worker, kind())
        done = result(assignment, list(range(100_000)), seq=70_000, index=3, **fields)

        yard.scripts.finish(worker, [done])

        assert yard.replies(assignment.request) == [done.reply]
        assert yard.result(assignment.request) == done.reply
