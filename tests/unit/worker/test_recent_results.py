"""What a worker remembers of requests that have ended."""

from __future__ import annotations

import time

import pytest

from tests.support.builders import make_assignment, make_request
from tests.support.loop_rig import INFO
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts.answers import Publication
from worker.process import recent_results
from worker.process.outcomes import Remembered, Run, result_reply
from worker.process.recent_results import MOST_BYTES, RecentResults


def answer(tokens: bytes = b"\1\0\0\0", **fields: object) -> Reply:
    values = {"id": "q", "event": "result", "seq": 0, "tokens": tokens, "status": "completed"}
    return Reply(**{**values, **fields})


def keep(ended: RecentResults, reply: Reply, age_s: float = 0.0) -> Assignment:
    """Keep a request that ended this long ago."""
    assignment = make_assignment()
    now = time.monotonic() - age_s
    ended.keep([(Run(assignment, now), Publication(assignment, reply))], now)
    return assignment


def test_a_request_is_known_by_client_id_and_server_id() -> None:
    ended, reply = RecentResults(), answer()
    request = make_request("q1", client="ann")
    first = make_assignment(request, sid="normal/1-0")
    ended.keep([(Run(first, 0.0), Publication(first, reply))], time.monotonic())

    assert ended.find(make_assignment(request, sid="normal/1-0", attempt=2, entry="9-9")) == reply
    for other in (
        make_assignment(request, sid="normal/2-0"),
        make_assignment(make_request("q1", client="bob"), sid="normal/1-0"),
        make_assignment(make_request("q2", client="ann"), sid="normal/1-0"),
    ):
        assert ended.find(other) is None


@pytest.mark.parametrize("status", ["failed", "expired"])
def test_only_completed_requests_are_kept(status: str) -> None:
    ended = RecentResults()
    assert ended.find(keep(ended, answer(status=status))) is None


def test_the_oldest_are_dropped_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_results, "MOST_RESULTS", 3)
    ended = RecentResults()
    kept = [keep(ended, answer()) for _ in range(5)]
    assert [ended.find(one) is not None for one in kept] == [False, False, True, True, True]


def test_the_oldest_are_dropped_if_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_results, "MOST_BYTES", 10_000)
    ended = RecentResults()
    kept = [keep(ended, answer(text="x" * 4_000)) for _ in range(3)]
    assert [ended.find(one) is not None for one in kept] == [False, True, True]
    too_large = keep(ended, answer(tokens=b"\0" * 20_000))
    assert ended.find(too_large) is None
    assert len(ended._results) == 0
    keep(ended, answer(logprobs="x" * 4_000))
    keep(ended, answer(choices="x" * 4_000))
    assert len(ended._results) == 2, "what is gone takes no room"


def test_a_repeated_result_takes_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_results, "MOST_BYTES", 2_000)
    ended, request = RecentResults(), make_assignment()
    for _ in range(10):
        ended.keep([(Run(request, 0.0), Publication(request, answer()))], time.monotonic())
    keep(ended, answer())
    assert len(ended._results) == 2


def test_old_results_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_results, "MOST_S", 60.0)
    ended = RecentResults()
    old, young = keep(ended, answer(), age_s=61.0), keep(ended, answer())
    assert (ended.find(old), len(ended._results)) == (None, 1)
    assert ended.find(young) is not None
    ended = RecentResults()
    assert ended.find(keep(ended, answer(), age_s=61.0)) is None, "it is too old, if the only one"


def test_results_of_requests_begun_before_a_reset_are_forgotten() -> None:
    ended = RecentResults()
    before, begun = keep(ended, answer()), Run(make_assignment(), time.monotonic())
    ended.forget()
    ended.keep([(begun, Publication(begun.assignment, answer()))], time.monotonic())

    assert ended.find(before) is None
    assert ended.find(begun.assignment) is None
    assert ended.find(keep(ended, answer())) is not None


def test_the_default_holds_the_results_of_many_seconds() -> None:
    ended = RecentResults()
    for _ in range(2_000):
        keep(ended, answer(tokens=b"\0" * 4 * 128, text="x" * 600))
    assert len(ended._results) == 2_000, f"of 128 tokens each in {MOST_BYTES} bytes"


def test_a_kept_result_is_published_unchanged_except_for_tokens_published_now() -> None:
    before = answer(seq=7, timing='{"queue_ms":3}', provenance='{"attempt":1}')
    again = make_assignment(attempt=2, published=[5, 9])

    reply = result_reply(Run(again, 0.0), Remembered("1-0", before), INFO, "w.2", 1.0)

    assert (reply.seq, reply.timing, reply.provenance) == (2, before.timing, before.provenance)
    assert (reply.tokens, reply.status) == (before.tokens, "completed")
