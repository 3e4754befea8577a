"""Reads of the yard: shared, bounded, and what becomes of those that fail or come too late."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.board.asking import HOST
from tests.board.keyed import keyed
from tests.support.servers import Server
from tests.support.yard import Yard
from tokenyard.board import app
from tokenyard.board.page import Page
from tokenyard.board.reading import Busy, YardReader
from tokenyard.board.yard import Parameters
from tokenyard.protocol.keys import Keys


@pytest.fixture
def reader(broker: Server, keys: Keys) -> Iterator[YardReader]:
    made = YardReader(broker.url, keys.yard, most_at_once=2, wait_s=0.3)
    yield made
    made.close()


def test_a_read_that_fails_fails_for_all_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, reader: YardReader, recwarn: pytest.WarningsRecorder
) -> None:
    tried = []

    def fail(yard: Yard) -> int:
        tried.append(1)
        time.sleep(0.05)
        raise ValueError(len(tried))

    async def test() -> None:
        both = await asyncio.gather(
            reader.shared("a", fail), reader.shared("a", fail), return_exceptions=True
        )
        assert [str(one) for one in both] == ["1", "1"]
        monkeypatch.setattr("tokenyard.board.reading._FRESH_S", -1.0)
        with pytest.raises(ValueError, match="2"):
            await reader.shared("a", fail)

    asyncio.run(test())


def test_who_asks_first_and_leaves_spoils_nothing(
    reader: YardReader, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(yard: Yard) -> int:
        time.sleep(0.2)
        return 7

    def fail(yard: Yard) -> int:
        time.sleep(0.1)
        raise ValueError

    async def test() -> None:
        first = asyncio.create_task(reader.shared("a", slow))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(reader.shared("a", slow))
        await asyncio.sleep(0.05)
        first.cancel()
        assert await second == 7
        alone = asyncio.create_task(reader.shared("b", fail))
        await asyncio.sleep(0.05)
        alone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await alone
        await asyncio.sleep(0.2)
        reader.forget()
        gc.collect()

    asyncio.run(test())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_what_waits_too_long_is_refused_and_not_done_later(reader: YardReader) -> None:
    done: list[str] = []

    def slow(yard: Yard) -> None:
        time.sleep(1.0)
        done.append("slow")

    async def test() -> None:
        busy = [asyncio.create_task(reader.run(slow)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(Exception, match="busy"):
            await reader.run(lambda yard: done.append("late"))
        await asyncio.gather(*busy)  # what has begun may take its time
        assert await reader.run(lambda yard: 3) == 3

    asyncio.run(test())
    assert done == ["slow", "slow"]


def test_so_many_may_wait_and_no_more(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    monkeypatch.setattr("tokenyard.board.reading._MOST_WAITING", 2)
    reader = YardReader(redis_url, "any", most_at_once=1, wait_s=30)
    may_end = threading.Event()

    async def test() -> None:
        taken = [asyncio.create_task(reader.run(lambda _: may_end.wait(30))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await reader.run(lambda _: None)
        may_end.set()
        await asyncio.gather(*taken)
        assert await reader.run(lambda _: 3) == 3

    asyncio.run(test())
    reader.close()


def test_what_is_kept_has_a_bound(reader: YardReader) -> None:
    async def test() -> None:
        for number in range(200):
            assert await reader.shared(number, lambda yard, n=number: n) == number
        assert len(reader._kept) <= 64
        reader.forget()
        assert await reader.shared(199, lambda yard: "new") == "new"

    asyncio.run(test())


def test_who_looks_at_the_same_costs_one_read(
    monkeypatch: pytest.MonkeyPatch, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    reads = []

    def view(yard: Yard, given: Parameters) -> dict[str, Any]:
        reads.append(given)
        time.sleep(0.2)
        return {"entries": [], "is_newest": True, "before": "", "most": 1}

    monkeypatch.setattr(app, "PAGES", [Page("/", "Yard", "audit.html", view)])
    with keyed(broker.url, connection, keys) as door:
        cookies = [door.log_in("viewer").encode() for _ in range(4)]

        async def test() -> None:
            await asyncio.gather(
                *(
                    door.ask.ask("GET", "/board/?a=1", [(b"host", host), (b"cookie", cookie)])
                    for cookie in cookies
                    for host in (HOST.encode(), b"localhost")
                )
            )

        asyncio.run(test())
        assert len(reads) == 1
        assert reads[0].actor.name == ""
        door.ask("/board/?a=2", cookie=cookies[0].decode())
        door.ask("/board/?a=2", cookie=door.log_in("admin"))
        assert len(reads) == 3
