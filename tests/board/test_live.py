"""Open pages, which are kept up to date: how many, for how long, and what they are sent."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import redis

from tests.board.asking import HOST, Asking, opened
from tests.board.keyed import keyed
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.board import access, app
from tokenyard.board.page import Actor
from tokenyard.protocol.keys import Keys, Yard


def looking(ask: Asking, count: int, most_bytes: int = 2**24) -> Any:
    headers = [(b"host", HOST.encode()), (b"accept", b"text/event-stream")]
    return [
        asyncio.create_task(ask.ask("GET", "/board/audit", headers, most_bytes=most_bytes))
        for _ in range(count)
    ]


async def are_open(ask: Asking, count: int) -> None:
    """Wait until so many pages are kept up to date."""
    await asyncio.to_thread(eventually, lambda: len(ask.board._streams._open) == count)


def test_so_many_open_pages_are_kept_up_to_date_and_no_more(broker: Server, keys: Keys) -> None:
    async def test(ask: Asking) -> None:
        first = looking(ask, 3)
        await are_open(ask, 3)
        (more,) = await asyncio.gather(*looking(ask, 1))
        assert more.status == 200
        assert "retry: 30000" in more.body
        assert "live_error" in more.body
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        # Their places are free again.
        (again,) = await asyncio.gather(*looking(ask, 1, most_bytes=1))
        assert "retry" not in again.body
        assert "live_entries" in again.body

    with opened(broker.url, keys.yard, max_streams=3) as ask:
        asyncio.run(asyncio.wait_for(test(ask), 60))


@pytest.mark.long
def test_an_open_page_has_to_come_back_after_a_time(broker: Server, keys: Keys) -> None:
    with opened(broker.url, keys.yard, stream_s=0.5) as ask:
        # It would last longer than a test may.
        answer = ask("/board/audit", accept="text/event-stream")
        assert answer.body.endswith("\n\n")


def test_a_board_that_stops_ends_its_open_pages(broker: Server, keys: Keys) -> None:
    async def test(ask: Asking) -> None:
        open_pages = looking(ask, 3)
        await are_open(ask, 3)
        ask.board.end_streams()
        answers = await asyncio.wait_for(asyncio.gather(*open_pages), 30)
        assert {answer.status for answer in answers} == {200}
        (more,) = await asyncio.gather(*looking(ask, 1))
        assert more.status == 503

    with opened(broker.url, keys.yard) as ask:
        asyncio.run(asyncio.wait_for(test(ask), 60))


def test_a_stream_of_a_head_is_none(ask: Asking) -> None:
    answer = ask("/board/audit", "HEAD", accept="text/event-stream")
    assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.long
def test_an_open_page_says_that_the_broker_is_away(
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    bare: Yard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given a page whose session is looked up at each turn
    monkeypatch.setattr(access, "TRUSTED_S", -1.0)
    look_up, looked = access._look_up, []

    def failing(yard: Yard, kind: str, digest: str) -> Actor | None:
        looked.append(kind)
        if looked.count("session") > 1:
            raise redis.ConnectionError("it is away")
        return look_up(yard, kind, digest)

    monkeypatch.setattr(access, "_look_up", failing)
    with keyed(redis_url, bare, stream_s=0.5) as door:
        # If the broker does not answer any more, I expect the page to be told,
        cookie = door.log_in("viewer")
        answer = door.ask("/board/audit", accept=app.EVENTS, cookie=cookie)
    assert answer.status == 200
    assert re.search(r"event: live_error\ndata: .*it is away", answer.body)
    # and no bug to be logged.
    assert "failed" not in caplog.text


def test_lines_of_a_block_cannot_begin_another_event() -> None:
    told = app._event("live_x", "a\r\nevent: live_y\rdata: b\n\ndata: c\u2028d")
    lines = re.split(r"\r\n|\n|\r", told)
    assert lines[0] == "event: live_x"
    assert all(line.startswith("data: ") or not line for line in lines[1:])
    assert told.count("\n\n") == 1
