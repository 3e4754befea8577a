"""The session and its exchanges: replies in, deltas and results out, without a server."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import make_delta, make_result
from tokenyard.client import router as sessions
from tokenyard.client.ledger import Snapshot
from tokenyard.client.pending import DeltaCursor, Patience, PendingRequest
from tokenyard.client.router import ReplyRouter, read_entries
from tokenyard.protocol.errors import RequestFailed, UnknownRequest, WaitTimeout
from tokenyard.protocol.replies import Choice, Reply, encode_reply, json_text
from tokenyard.protocol.wire import pack_tokens


def frame(*replies: Reply) -> dict[bytes, bytes]:
    return {b"frame": msgspec.msgpack.encode(replies)}


def open_exchange(session: ReplyRouter, request_id: str = "q", now: float = 0.0) -> PendingRequest:
    exchange = session.open(request_id, None, now)
    exchange.is_submitted = True
    return exchange


def tokens_of(exchange: PendingRequest) -> list[int]:
    return [token for delta in DeltaCursor(exchange).read() for token in delta.tokens]


def running(published: bytes = b"") -> Snapshot:
    return Snapshot("assigned", None, published)


class TestReplies:
    def test_go_to_their_exchanges(self) -> None:
        session = ReplyRouter(0.0)
        first, second = open_exchange(session, "a"), open_exchange(session, "b")
        session.take([(b"5-1", frame(make_result("b", [2]), make_result("a", [1])))], 1.0)
        assert (first.success().tokens, second.success().tokens) == ([1], [2])
        assert len(session) == 0
        assert session.cursor == "5-1"

    def test_that_nobody_asked_for_yet_are_kept(self) -> None:
        session = ReplyRouter(0.0)
        session.take([(b"5-1", frame(make_delta("q", 0, [1]), make_delta("q", 1, [2])))], 1.0)
        assert tokens_of(session.open("q", None, 2.0)) == [1, 2]
        assert tokens_of(session.open("q", None, 2.0)) == []

    def test_that_nobody_asks_for_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tokenyard.client.router.MOST_UNCLAIMED", 2)
        session = ReplyRouter(0.0)
        for number in range(5):
            session.take([(b"%d-0" % number, frame(make_delta(str(number), 0, [1])))], 1.0)
        session.take([(b"9-0", frame(make_result("4", [1])))], 1.0)
        kept = [number for number in range(5) if tokens_of(session.open(str(number), None, 2.0))]
        assert kept == [3], "the oldest went for lack of room, the last with its result"

    def test_that_cannot_be_read_are_skipped(self) -> None:
        session = ReplyRouter(0.0)
        exchange = open_exchange(session)
        entries = [(b"1-0", {b"frame": b"\xff"}), (b"2-0", {b"x": b"\xff"})]
        session.take([*entries, (b"3-0", frame(make_result("q", [1])))], 1.0)
        assert exchange.success().tokens == [1]

    def test_tell_whoever_listens(self) -> None:
        session = ReplyRouter(0.0)
        exchange = open_exchange(session)
        heard: list[PendingRequest] = []
        exchange.listeners.append(heard.append)
        delta = make_delta("q", 0, [1])
        session.take([(b"1-0", frame(delta)), (b"2-0", frame(delta))], 1.0)
        assert heard == [exchange], "a repeated delta is no news"

    def test_of_an_empty_read(self) -> None:
        assert list(read_entries(None)) == list(read_entries([])) == []


class TestTokens:
    def test_are_shown_once_however_often_they_come(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        for seq, tokens in ((0, [1, 2]), (0, [1, 2]), (2, [3]), (0, [1, 2, 3, 4]), (2, [3])):
            exchange.take(make_delta("q", seq, tokens), 0.0)
        assert tokens_of(exchange) == [1, 2, 3, 4]

    def test_of_a_hole_come_from_the_ledger(self) -> None:
        session = ReplyRouter(0.0)
        exchange = open_exchange(session)
        session.take([(b"1-0", frame(make_delta("q", 2, [3])))], 0.0)
        assert tokens_of(exchange) == []
        assert session.due(0.0, is_behind=True) == [exchange]
        session.settle([exchange], [running(pack_tokens([1, 2, 3, 4]))])
        assert session.due(0.0, is_behind=True) == []
        session.take([(b"2-0", frame(make_delta("q", 3, [4]), make_delta("q", 4, [5])))], 0.0)
        assert tokens_of(exchange) == [1, 2, 3, 4, 5]

    def test_after_the_result_are_ignored(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        exchange.take(make_result("q", [1, 2]), 0.0)
        exchange.take(make_delta("q", 0, [9]), 0.0)
        exchange.take_published(pack_tokens([9]))
        assert tokens_of(exchange) == [1, 2]

    @given(st.data())
    def test_survive_any_loss_and_repetition(self, data: st.DataObject) -> None:
        whole = data.draw(st.lists(st.integers(0, 9), max_size=12))
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)))))
        edges = [0, *(cut for cut in cuts if cut < len(whole)), len(whole)]
        spans = list(itertools.pairwise(edges))
        heard = data.draw(st.lists(st.sampled_from(spans), max_size=12))
        session = ReplyRouter(0.0)
        exchange = open_exchange(session)
        for count, (start, end) in enumerate(heard):
            session.take([(b"%d-0" % count, frame(make_delta("q", start, whole[start:end])))], 0.0)
            for lost in session.due(0.0, is_behind=True):
                # The ledger is at least as far as the stream was when the hole was seen.
                session.settle([lost], [running(pack_tokens(whole[:end]))])
        exchange.take(make_result("q", whole, seq=exchange.published), 0.0)
        assert tokens_of(exchange) == whole


class TestText:
    def test_of_all_pieces_is_the_whole(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        exchange.take(make_delta("q", 0, [1], text="He"), 0.0)
        exchange.take(make_delta("q", 1, [2], text="l"), 0.0)
        exchange.take(make_result("q", [1, 2, 3], text="Hello"), 0.0)
        assert [delta.text for delta in DeltaCursor(exchange).read()] == ["He", "l", "lo"]

    def test_behind_a_hole_waits_for_the_result(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        exchange.take(make_delta("q", 0, [1], text="H"), 0.0)
        exchange.take_published(pack_tokens([1, 2]))
        exchange.take(make_delta("q", 2, [3], text="l"), 0.0)
        exchange.take(make_result("q", [1, 2, 3], text="Hel"), 0.0)
        deltas = list(DeltaCursor(exchange).read())
        assert [delta.tokens for delta in deltas] == [[1], [2], [3], []]
        assert [delta.text for delta in deltas] == ["H", None, None, "el"]

    def test_of_several_choices_is_kept_apart(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        exchange.take(make_delta("q", 0, [1], text="a"), 0.0)
        exchange.take(make_delta("q", 1, [5], text="x", index=1), 0.0)
        choices = [Choice(0, [1, 2], "ab"), Choice(1, [5, 6], "xy")]
        exchange.take(make_result("q", [1, 2], seq=2, text="ab", choices=json_text(choices)), 0.0)
        deltas = list(DeltaCursor(exchange).read())
        assert [(each.index, each.tokens, each.text) for each in deltas] == [
            (0, [1], "a"),
            (1, [5], "x"),
            (0, [2], "b"),
            (1, [6], "y"),
        ]

    def test_of_several_choices_is_never_filled_from_the_ledger(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        exchange.is_interleaved = True
        exchange.take(make_delta("q", 2, [6], index=1), 0.0)
        exchange.take_published(pack_tokens([1, 5, 6]))
        choices = [Choice(0, [1, 2]), Choice(1, [5, 6])]
        exchange.take(make_result("q", [1, 2], seq=3, choices=json_text(choices)), 0.0)
        deltas = list(DeltaCursor(exchange).read())
        assert [(each.index, each.tokens) for each in deltas] == [(0, [1, 2]), (1, [5, 6])]


class TestEnd:
    def test_of_a_cursor_is_after_the_tail(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        cursor = DeltaCursor(exchange)
        assert not cursor.has_news
        exchange.take(make_delta("q", 0, [1]), 0.0)
        assert cursor.has_news
        assert [delta.tokens for delta in cursor.read()] == [[1]]
        assert not cursor.has_news
        assert not cursor.is_over
        exchange.take(make_result("q", [1]), 0.0)
        assert cursor.has_news
        assert list(cursor.read()) == []
        assert cursor.is_over

    def test_of_a_failed_request_is_an_error(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        exchange.take(make_result("q", [1], status="expired"), 0.0)
        cursor = DeltaCursor(exchange)
        pieces = cursor.read()
        assert next(pieces).tokens == [1]
        with pytest.raises(RequestFailed, match="expired"):
            next(pieces)
        assert exchange.result().status == "expired"

    def test_of_waiting_comes_with_closing(self) -> None:
        session = ReplyRouter(0.0)
        exchange = open_exchange(session)
        session.forget_all(WaitTimeout("closed"))
        with pytest.raises(WaitTimeout, match="closed"):
            exchange.result()

    def test_of_patience(self) -> None:
        exchange = open_exchange(ReplyRouter(0.0))
        with pytest.raises(WaitTimeout, match="'q'"):
            Patience(None, 0.0).left_s(exchange)
        assert 0 < Patience(float("inf"), 0.0).left_s(exchange) < float("inf")

    def test_of_patience_begins_anew_with_each_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Given a wait whose time is over
        exchange, now = open_exchange(ReplyRouter(0.0)), [100.0]
        monkeypatch.setattr("tokenyard.client.pending.time.monotonic", lambda: now[0])
        patience = Patience(None, 5.0)
        now[0] = 106.0
        with pytest.raises(WaitTimeout):
            patience.left_s(exchange)

        # If another begins, I expect it to have all of the time.
        patience.renew()
        assert patience.left_s(exchange) == 5.0


class TestLookingUp:
    def test_is_for_the_silent(self) -> None:
        session = ReplyRouter(0.0)
        silent, heard = open_exchange(session, "silent"), open_exchange(session, "heard")
        unsent = session.open("unsent", None, 0.0)
        later = sessions.CHECK_AFTER_S
        session.take([(b"1-0", frame(make_delta("heard", 0, [1])))], later)
        assert session.due(later, is_behind=True) == [], "while behind, silence means nothing"
        assert session.due(later, is_behind=False) == [silent]
        assert session.due(later + 0.1, is_behind=False) == [], "each once in a while"
        assert [each.is_over for each in (heard, unsent)] == [False, False]

    def test_is_bounded_and_comes_round(self) -> None:
        session = ReplyRouter(0.0)
        count = sessions.MOST_CHECKS + 10
        for number in range(count):
            open_exchange(session, str(number))
        now = sessions.CHECK_AFTER_S
        first = session.due(now, is_behind=False)
        second = session.due(now + sessions.CHECK_EVERY_S, is_behind=False)
        assert [each.id for each in first + second] == [str(number) for number in range(count)]

    def test_finds_a_result(self) -> None:
        session = ReplyRouter(0.0)
        exchange = open_exchange(session)
        result = encode_reply(make_result("q", [1, 2]))
        session.settle([exchange], [Snapshot("completed", result, b"")])
        assert exchange.success().tokens == [1, 2]
        assert len(session) == 0

    def test_finds_nothing(self) -> None:
        session = ReplyRouter(0.0)
        exchange = open_exchange(session)
        session.settle([exchange], [Snapshot("", None, b"")])
        with pytest.raises(UnknownRequest):
            exchange.result()

    def test_leaves_tokens_to_the_stream_where_nothing_is_missing(self) -> None:
        session = ReplyRouter(0.0)
        exchange = open_exchange(session)
        session.settle([exchange], [running(pack_tokens([1]))])
        assert exchange.published == 0, "their text is on its way"


class TestComingBack:
    def test_tokens_are_taken_from_the_stream_first(self) -> None:
        session = ReplyRouter(0.0)
        heard, trimmed = open_exchange(session, "heard"), open_exchange(session, "trimmed")
        session.resume([heard, trimmed])
        session.settle([heard, trimmed], [running(pack_tokens([1])), running(pack_tokens([2]))])
        session.take([(b"1-0", frame(make_delta("heard", 0, [1], text="a")))], 0.0)
        session.catch_up()
        assert session.due(0.0, is_behind=False) == [trimmed]
        session.settle([trimmed], [running(pack_tokens([2]))])
        assert (heard.published, trimmed.published) == (1, 1)

    def test_tokens_come_from_the_ledger_once_the_stream_was_read(self) -> None:
        session = ReplyRouter(0.0)
        session.catch_up()
        exchange = open_exchange(session)
        session.resume([exchange])
        session.settle([exchange], [running(pack_tokens([1, 2]))])
        assert exchange.published == 2


class TestTrimming:
    def test_waits_for_time_or_number(self) -> None:
        session = ReplyRouter(0.0)
        assert session.trim_from(100.0) is None, "nothing was read"
        session.take([(b"7-3", frame())], 0.0)
        assert session.trim_from(sessions.TRIM_EVERY_S / 2) is None
        assert session.trim_from(sessions.TRIM_EVERY_S) == "7-4", "what was read goes, no more"
        entries: list[Any] = [(b"8-%d" % n, frame()) for n in range(sessions.TRIM_EVERY_ENTRIES)]
        session.take(entries, sessions.TRIM_EVERY_S)
        assert session.trim_from(sessions.TRIM_EVERY_S) == f"8-{sessions.TRIM_EVERY_ENTRIES}"

    def test_at_the_end_does_not_wait(self) -> None:
        session = ReplyRouter(0.0)
        session.take([(b"7-3", frame())], 0.0)
        assert session.trim_rest(0.0) == "7-4"
        assert session.trim_rest(0.0) is None
