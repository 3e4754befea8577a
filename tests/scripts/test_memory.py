"""A server at its memory limit: new requests are refused, and accepted ones still end."""

from __future__ import annotations

import pytest
import redis

from tests.support.builders import framed, make_delta, make_request, make_result, worker_json
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.scripts.answers import Answered, Cancelled, HandedBack, Publication, Published


def test_new_request_is_refused_and_leaves_no_trace(yard: PlayedYard) -> None:
    request = make_request()

    with yard.without_memory(), pytest.raises(redis.OutOfMemoryError):
        yard.scripts.submit("normal", [request], watched="ann")

    assert yard.ledger(request) == {}
    assert yard.intake() == []
    assert yard.queued_tokens() == 0
    assert not yard.connection.exists(yard.keys.clients)


def test_accepted_requests_run_stream_and_end(yard: PlayedYard, worker: str) -> None:
    waiting, running = yard.submit(), yard.assign(worker, framed(stream=True))
    request = running.request
    delta = Publication(running, make_delta(request.id, 0, [1]))
    result = Publication(running, make_result(request.id, [1], seq=1))

    with yard.without_memory():
        yard.place(waiting, worker)
        assert yard.scripts.emit(worker, [delta]) == [Published.PUBLISHED]
        assert yard.scripts.finish(worker, [result]) == [Published.PUBLISHED]

    assert yard.replies(request) == [delta.reply, result.reply]


def test_waiting_requests_are_answered_and_cancelled(yard: PlayedYard) -> None:
    invalid, unwanted, running = yard.submit(), yard.submit(), yard.assign(yard.worker())

    with yard.without_memory():
        assert yard.answer(invalid, dead="x") is Answered.DONE
        for request in (unwanted.request, running.request):
            assert yard.scripts.cancel("anon", request.id, "x") is Cancelled.CANCELLED


def test_leader_takes_over_on_a_full_server(yard: PlayedYard, worker: str) -> None:
    """Given a full server whose leader dies, I expect a successor to free memory again."""
    running = yard.assign(worker)
    with yard.without_memory():
        token = yard.depose()
        yard.scripts.take_over(token, {"models": "[]"})
        assert yard.scripts.lead("successor", LONG_MS, token) == token
        assert yard.finish(worker, running) is Published.PUBLISHED

    assert yard.connection.hget(yard.keys.info, "models") == b"[]"


def test_workers_join_renew_and_leave_on_a_full_server(yard: PlayedYard) -> None:
    with yard.without_memory():
        worker = yard.worker()
        assert yard.scripts.renew(LONG_MS, [(worker, worker_json())]) == [True]
        assert yard.scripts.retire(worker, "left") == 0


def test_requests_of_a_lost_worker_are_rescued_and_handed_back(yard: PlayedYard) -> None:
    one, two = yard.worker(), yard.worker()
    lost, faulty = yard.assign(one), yard.assign(two)

    with yard.without_memory():
        yard.scripts.retire(one, "crashed", "signal 11")
        assert yard.rescue(one) == 0
        assert yard.scripts.hand_back(two, faulty, 0, "x") is HandedBack.HANDED_BACK
        yard.place(yard.waiting(lost.request), two, alone=True)

    assert yard.alone(two) is not None
