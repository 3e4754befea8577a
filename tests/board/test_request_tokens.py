"""The tokens of a running request: their number, rate and text, and how an open page gets them."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.board.asking import opened
from tests.board.looking import Looker, text_of
from tests.board.request_rig import SEES, asking, look
from tests.support.builders import make_delta
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.board.page import request_address
from tokenyard.board.pages import request as one
from tokenyard.board.pages.request import MOST_TOKENS, Tokenizers, token_rate
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.scripts.answers import Publication

pytestmark = pytest.mark.valkey_only


def publishing(yard: PlayedYard, tokens: Iterable[int], **info: Any) -> Request:
    """A running request that has published tokens, at a worker whose entry says this."""
    worker, request = yard.worker(**info), asking(stream=True)
    assignment = yard.assign(worker, request)
    yard.scripts.emit(worker, [Publication(assignment, make_delta(request.id, 0, tokens))])
    return request


def test_tokens_grow_in_the_live_block_and_only_the_last_are_read(
    looker: Looker, yard: PlayedYard
) -> None:
    looker.actor = SEES
    request = asking(stream=True, params=SamplingParams(max_tokens=100_000))
    worker = yard.worker()
    assignment = yard.assign(worker, request)
    assert "None is published yet." in look(looker, request)
    at = 0
    for count in (1, 10, 600):
        made = range(at, at + count)
        yard.scripts.emit(worker, [Publication(assignment, make_delta("q", at, made))])
        at += count
        page = look(looker, request)
        assert f"{at:,} published" in text_of(page)
        assert f" {at - 1}</pre>" in page or at == 1
    assert f"The last {MOST_TOKENS} token ids" in page
    assert f">{at - MOST_TOKENS} " in page
    assert f" {at - MOST_TOKENS - 1} " not in page
    assert len(page) < 20_000


def test_the_rate_is_that_of_the_last_looks() -> None:
    request, other = object(), object()
    assert token_rate(request, 1_000, 5) is None
    assert token_rate(request, 2_000, 15) == 10.0
    assert token_rate(other, 2_000, 15) is None
    for at_ms in range(3_000, 60_000, 1_000):
        rate = token_rate(request, at_ms, 15 + at_ms // 500)
    assert rate == 2.0
    assert token_rate(request, 61_000, 3) is None  # it runs under this id again
    assert token_rate(request, 62_000, 3) is None
    assert token_rate(request, 63_000, 9) == 6.0


class Upper:
    """A tokenizer whose tokens are letters."""

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [[ord(one) for one in text] for text in texts]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, tokens))


def test_tokens_are_text_where_the_tokenizer_is_on_this_host(
    looker: Looker, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looker.actor = SEES
    loaded: list[str] = []
    may_load = threading.Event()

    def load(source: object) -> Upper:
        may_load.wait(30)
        loaded.append(str(source))
        return Upper()

    monkeypatch.setattr(one, "load_tokenizer", load)
    monkeypatch.setattr(one, "_TOKENIZERS", Tokenizers())
    text = "<b>\u202eletters</b>"
    request = publishing(yard, map(ord, text), tokenizer=str(tmp_path))
    assert "The model's tokenizer is being loaded." in look(looker, request)
    may_load.set()
    shown = eventually(lambda: page if "letters" in (page := look(looker, request)) else "")
    assert "<b>" not in shown
    assert "\u202e" not in shown
    assert "&lt;b&gt;\\u202eletters" in shown
    assert loaded == [str(tmp_path)]


def test_ids_are_shown_where_the_tokenizer_cannot_be_loaded(
    looker: Looker, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looker.actor = SEES

    def load(source: object) -> Upper:
        raise RuntimeError(f"{source} is empty")

    monkeypatch.setattr(one, "load_tokenizer", load)
    monkeypatch.setattr(one, "_TOKENIZERS", Tokenizers())
    request = publishing(yard, [41, 42], tokenizer=str(tmp_path))
    eventually(lambda: "41 42" in look(looker, request))


def test_unused_tokenizers_make_room_for_others(
    yard: PlayedYard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given workers of more models than tokenizers are kept
    monkeypatch.setattr(one, "load_tokenizer", lambda _: Upper())
    board, tokenizers, workers = Yard(yard.connection, yard.keys, ""), Tokenizers(), []
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        workers.append(yard.worker(tokenizer=str(folder)))
    # While the first ones are in use,
    for worker in workers[:4]:
        eventually(lambda worker=worker: tokenizers.text(board, worker, [65])[0] == "A")
    # I expect no room for another,
    assert tokenizers.text(board, workers[4], [65]) == (None, False)
    # and room once nobody has looked for a while.
    monkeypatch.setattr(one, "_UNUSED_S", 0.0)
    eventually(lambda: tokenizers.text(board, workers[4], [65])[0] == "A")
    assert tokenizers.text(board, workers[0], [65]) == (None, True)


@pytest.mark.parametrize("path", ["", "gpt2", "../..", "/no/such/folder"])
def test_no_tokenizer_is_fetched_from_elsewhere(
    looker: Looker, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    looker.actor = SEES
    monkeypatch.setattr(one, "_TOKENIZERS", Tokenizers())
    monkeypatch.setattr(one, "load_tokenizer", lambda source: pytest.fail(str(source)))
    request = publishing(yard, [41, 42], tokenizer=path)
    assert "41 42" in look(looker, request)


def test_tokens_that_are_none_break_nothing(looker: Looker, yard: PlayedYard) -> None:
    looker.actor = SEES
    request = asking(stream=True)
    yard.assign(yard.worker(), request)
    yard.connection.set(yard.keys.tokens("ann", "q"), b"five!")
    assert "1 published" in text_of(look(looker, request))


def test_a_request_that_does_not_stream_says_so(looker: Looker, yard: PlayedYard) -> None:
    request = asking()
    yard.assign(yard.worker(), request)
    assert "It does not stream" in look(looker, request)


@contextmanager
def running(publish: Callable[[], None], ended: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.long
def test_an_open_page_is_sent_its_tokens_as_they_are_published(
    yard: PlayedYard, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenyard.board.reading._FRESH_S", 0.0)
    request = asking(stream=True)
    worker = yard.worker()
    assignment = yard.assign(worker, request)
    ended = threading.Event()

    def publish() -> None:
        for seq in itertools.count():
            if ended.wait(0.05):
                return
            yard.scripts.emit(worker, [Publication(assignment, make_delta("q", seq, [seq]))])

    with opened(redis_url, yard.keys.yard) as asked, running(publish, ended):
        answer = asked(
            f"/board{request_address('ann', 'q')}", accept="text/event-stream", most_bytes=9_000
        )
    # Each look has more, and only what has changed is sent.
    blocks = re.findall(r"event: (live_\w+)\n((?:data: .*\n)+)", answer.body)
    shown = [text_of(html) for name, html in blocks if name == "live_tokens"]
    counts = [int(found[1]) for one in shown if (found := re.search(r"(\d+) published", one))]
    assert len(counts) >= 2
    assert counts == sorted(set(counts))
    assert [name for name, _ in blocks].count("live_state") == 1
