"""The session and its exchanges: replies in, deltas and results out, without a server."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import make_delta, make_result
from tests.support.fake_clock import FakeClock
from tokenyard.client import router as sessions
from tokenyard.client.ledger import RequestSnapshot
from tokenyard.client.pending import DeltaCursor, PendingRequest, WaitDeadline
from tokenyard.client.router import ReplyRouter, read_entries
from tokenyard.protocol.errors import WaitTimeout
from tokenyard.protocol.replies import Choice, Reply, json_text
from tokenyard.protocol.wire import pack_tokens


def frame(*replies: Reply) -> dict[bytes, bytes]:
    return {b"frame": msgspec.msgpack.encode(replies)}


def open_exchange(router: ReplyRouter, request_id: str = "q", now: float = 0.0) -> PendingRequest:
    pending = router.open(request_id, None, now)
    pending.is_submitted = True
    return pending


@pytest.fixture
def router() -> ReplyRouter:
    return ReplyRouter(0.0)


@pytest.fixture
def pending(router: ReplyRouter) -> PendingRequest:
    """A submitted request `q` of the router."""
    return open_exchange(router)


def tokens_of(pending: PendingRequest) -> list[int]:
    return [token for delta in DeltaCursor(pending).read() for token in delta.tokens]


def running(published: bytes = b"") -> RequestSnapshot:
    return RequestSnapshot("assigned", None, published)


class TestReplies:
    def test_go_to_their_exchanges(self, router: ReplyRouter) -> None:
        first, second = open_exchange(router, "a"), open_exchange(router, "b")
        router.take([(b"5-1", frame(make_result("b", [2]), make_result("a", [1])))], 1.0)
        assert (first.result().tokens, second.result().tokens) == ([1], [2])
        assert router.find("a") is router.find("b") is None
        assert router.cursor == "5-1"

    def test_that_nobody_asked_for_yet_are_kept(self, router: ReplyRouter) -> None:
        router.take([(b"5-1", frame(make_delta("q", 0, [1]), make_delta("q", 1, [2])))], 1.0)
        assert tokens_of(router.open("q", None, 2.0)) == [1, 2]
        assert tokens_of(router.open("q", None, 2.0)) == []

    def test_that_nobody_asks_for_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tokenyard.client.router.MOST_UNCLAIMED", 2)
        router = ReplyRouter(0.0)
        for number in range(5):
            router.take([(b"%d-0" % number, frame(make_delta(str(number), 0, [1])))], 1.0)
        router.take([(b"9-0", frame(make_result("4", [1])))], 1.0)
        kept = [number for number in range(5) if tokens_of(router.open(str(number), None, 2.0))]
        assert kept == [3], "the oldest went for lack of room, the last with its result"

    def test_tell_whoever_listens(self, router: ReplyRouter, pending: PendingRequest) -> None:
        heard: list[PendingRequest] = []
        pending.listeners.append(heard.append)
        delta = make_delta("q", 0, [1])
        router.take([(b"1-0", frame(delta)), (b"2-0", frame(delta))], 1.0)
        assert heard == [pending], "a repeated delta is no news"

    def test_of_an_empty_read(self) -> None:
        assert list(read_entries(None)) == list(read_entries([])) == []


class TestTokens:
    def test_are_shown_once_however_often_they_come(self, pending: PendingRequest) -> None:
        for seq, tokens in ((0, [1, 2]), (0, [1, 2]), (2, [3]), (0, [1, 2, 3, 4]), (2, [3])):
            pending.take(make_delta("q", seq, tokens), 0.0)
        assert tokens_of(pending) == [1, 2, 3, 4]

    def test_of_a_hole_come_from_the_ledger(
        self, router: ReplyRouter, pending: PendingRequest
    ) -> None:
        router.take([(b"1-0", frame(make_delta("q", 2, [3])))], 0.0)
        assert tokens_of(pending) == []
        assert router.due(0.0, is_behind=True) == [pending]
        router.settle([pending], [running(pack_tokens([1, 2, 3, 4]))])
        assert router.due(0.0, is_behind=True) == []
        router.take([(b"2-0", frame(make_delta("q", 3, [4]), make_delta("q", 4, [5])))], 0.0)
        assert tokens_of(pending) == [1, 2, 3, 4, 5]

    def test_after_the_result_are_ignored(self, pending: PendingRequest) -> None:
        pending.take(make_result("q", [1, 2]), 0.0)
        pending.take(make_delta("q", 0, [9]), 0.0)
        pending.take_published(pack_tokens([9]))
        assert tokens_of(pending) == [1, 2]

    @given(st.data())
    def test_survive_any_loss_and_repetition(self, data: st.DataObject) -> None:
        whole = data.draw(st.lists(st.integers(0, 9), max_size=12))
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)))))
        edges = [0, *(cut for cut in cuts if cut < len(whole)), len(whole)]
        spans = list(itertools.pairwise(edges))
        heard = data.draw(st.lists(st.sampled_from(spans), max_size=12))
        router = ReplyRouter(0.0)
        pending = open_exchange(router)
        for count, (start, end) in enumerate(heard):
            router.take([(b"%d-0" % count, frame(make_delta("q", start, whole[start:end])))], 0.0)
            for lost in router.due(0.0, is_behind=True):
                # The ledger is at least as far as the stream was when the hole was seen.
                router.settle([lost], [running(pack_tokens(whole[:end]))])
        pending.take(make_result("q", whole, seq=pending.published), 0.0)
        assert tokens_of(pending) == whole


class TestText:
    def test_behind_a_hole_waits_for_the_result(self, pending: PendingRequest) -> None:
        pending.take(make_delta("q", 0, [1], text="H"), 0.0)
        pending.take_published(pack_tokens([1, 2]))
        pending.take(make_delta("q", 2, [3], text="l"), 0.0)
        pending.take(make_result("q", [1, 2, 3], text="Hel"), 0.0)
        deltas = list(DeltaCursor(pending).read())
        assert [delta.tokens for delta in deltas] == [[1], [2], [3], []]
        assert [delta.text for delta in deltas] == ["H", "", "", "el"]

    def test_of_several_choices_is_kept_apart(self, pending: PendingRequest) -> None:
        pending.take(make_delta("q", 0, [1], text="a"), 0.0)
        pending.take(make_delta("q", 1, [5], text="x", index=1), 0.0)
        choices = [Choice(0, [1, 2], "ab"), Choice(1, [5, 6], "xy")]
        pending.take(make_result("q", [1, 2], seq=2, text="ab", choices=json_text(choices)), 0.0)
        deltas = list(DeltaCursor(pending).read())
        assert [(each.index, each.tokens, each.text) for each in deltas] == [
            (0, [1], "a"),
            (1, [5], "x"),
            (0, [2], "b"),
            (1, [6], "y"),
        ]

    def test_of_several_choices_is_never_filled_from_the_ledger(
        self, pending: PendingRequest
    ) -> None:
        pending.is_interleaved = True
        pending.take(make_delta("q", 2, [6], index=1), 0.0)
        pending.take_published(pack_tokens([1, 5, 6]))
        choices = [Choice(0, [1, 2]), Choice(1, [5, 6])]
        pending.take(make_result("q", [1, 2], seq=3, choices=json_text(choices)), 0.0)
        deltas = list(DeltaCursor(pending).read())
        assert [(each.index, each.tokens) for each in deltas] == [(0, [1, 2]), (1, [5, 6])]


class TestEnd:
    def test_of_a_cursor_is_after_the_tail(self, pending: PendingRequest) -> None:
        cursor = DeltaCursor(pending)
        assert not cursor.has_updates
        pending.take(make_delta("q", 0, [1]), 0.0)
        assert cursor.has_updates
        assert [delta.tokens for delta in cursor.read()] == [[1]]
        assert not cursor.has_updates
        assert not cursor.is_over
        pending.take(make_result("q", [1]), 0.0)
        assert cursor.has_updates
        assert list(cursor.read()) == []
        assert cursor.is_over

    def test_of_patience(self, pending: PendingRequest) -> None:
        with pytest.raises(WaitTimeout, match="'q'"):
            WaitDeadline(None, 0.0).left_s(pending)
        assert 0 < WaitDeadline(float("inf"), 0.0).left_s(pending) < float("inf")

    def test_of_patience_begins_again_with_each_wait(self, fake_clock: FakeClock) -> None:
        # Given a wait whose time is over
        pending = open_exchange(ReplyRouter(0.0))
        patience = WaitDeadline(None, 5.0)
        fake_clock.advance(6.0)
        with pytest.raises(WaitTimeout):
            patience.left_s(pending)

        # If another begins, I expect it to have all of the time.
        patience.renew()
        assert patience.left_s(pending) == 5.0


class TestLookingUp:
    def test_look_up_is_for_silent_requests(self, router: ReplyRouter) -> None:
        silent, heard = open_exchange(router, "silent"), open_exchange(router, "heard")
        unsent = router.open("unsent", None, 0.0)
        later = sessions.CHECK_AFTER_S
        router.take([(b"1-0", frame(make_delta("heard", 0, [1])))], later)
        assert router.due(later, is_behind=True) == [], "while behind, silence means nothing"
        assert router.due(later, is_behind=False) == [silent]
        assert router.due(later + 0.1, is_behind=False) == [], "each once in a while"
        assert [each.is_over for each in (heard, unsent)] == [False, False]

    def test_look_up_is_bounded_and_reaches_all_requests(self, router: ReplyRouter) -> None:
        count = sessions.MOST_CHECKS + 10
        for number in range(count):
            open_exchange(router, str(number))
        now = sessions.CHECK_AFTER_S
        first = router.due(now, is_behind=False)
        second = router.due(now + sessions.CHECK_EVERY_S, is_behind=False)
        assert [each.id for each in first + second] == [str(number) for number in range(count)]

    def test_leaves_tokens_to_the_stream_where_nothing_is_missing(
        self, router: ReplyRouter, pending: PendingRequest
    ) -> None:
        router.settle([pending], [running(pack_tokens([1]))])
        assert pending.published == 0, "their text is on its way"


class TestComingBack:
    def test_tokens_are_taken_from_the_stream_first(self, router: ReplyRouter) -> None:
        heard, trimmed = open_exchange(router, "heard"), open_exchange(router, "trimmed")
        router.resume([heard, trimmed])
        router.settle([heard, trimmed], [running(pack_tokens([1])), running(pack_tokens([2]))])
        router.take([(b"1-0", frame(make_delta("heard", 0, [1], text="a")))], 0.0)
        router.catch_up()
        assert router.due(0.0, is_behind=False) == [trimmed]
        router.settle([trimmed], [running(pack_tokens([2]))])
        assert (heard.published, trimmed.published) == (1, 1)

    def test_tokens_come_from_the_ledger_once_the_stream_was_read(
        self, router: ReplyRouter
    ) -> None:
        router.catch_up()
        pending = open_exchange(router)
        router.resume([pending])
        router.settle([pending], [running(pack_tokens([1, 2]))])
        assert pending.published == 2


class TestTrimming:
    def test_waits_for_time_or_number(self, router: ReplyRouter) -> None:
        assert router.trim_from(100.0) is None, "nothing was read"
        router.take([(b"7-3", frame())], 0.0)
        assert router.trim_from(sessions.TRIM_EVERY_S / 2) is None
        assert router.trim_from(sessions.TRIM_EVERY_S) == "7-4", "what was read goes, no more"
        entries: list[Any] = [(b"8-%d" % n, frame()) for n in range(sessions.TRIM_EVERY_ENTRIES)]
        router.take(entries, sessions.TRIM_EVERY_S)
        assert router.trim_from(sessions.TRIM_EVERY_S) == f"8-{sessions.TRIM_EVERY_ENTRIES}"

    def test_at_the_end_does_not_wait(self, router: ReplyRouter) -> None:
        router.take([(b"7-3", frame())], 0.0)
        assert router.trim_rest(0.0) == "7-4"
        assert router.trim_rest(0.0) is None
