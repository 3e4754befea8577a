"""Reads of the yard: shared, bounded, and what becomes of those that fail or come too late."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.board.asking import HOST
from tests.board.keyed import keyed
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.board import app
from tokenyard.board.page import Page, Parameters
from tokenyard.board.reading import Busy, YardReader
from tokenyard.protocol.keys import Keys, Yard

WAIT_S = 60.0


async def has_begun(begun: Sequence[object], count: int) -> None:
    """Wait until so many functions run."""
    await asyncio.to_thread(eventually, lambda: len(begun) >= count)


@pytest.fixture
def reader(broker: Server, keys: Keys) -> Iterator[YardReader]:
    made = YardReader(broker.url, keys.yard, most_at_once=2, wait_s=WAIT_S)
    yield made
    made.close()


def test_a_read_that_fails_fails_for_all_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, reader: YardReader, recwarn: pytest.WarningsRecorder
) -> None:
    tried = []
    both_ask = threading.Event()

    def fail(yard: PlayedYard) -> int:
        tried.append(1)
        assert both_ask.wait(WAIT_S)
        raise ValueError(len(tried))

    async def test() -> None:
        both = [asyncio.create_task(reader.shared("a", fail)) for _ in range(2)]
        await has_begun(tried, 1)
        both_ask.set()
        errors = await asyncio.gather(*both, return_exceptions=True)
        assert [str(one) for one in errors] == ["1", "1"]
        monkeypatch.setattr("tokenyard.board.reading._FRESH_S", -1.0)
        with pytest.raises(ValueError, match="2"):
            await reader.shared("a", fail)

    asyncio.run(test())


def test_who_asks_first_and_leaves_spoils_nothing(
    reader: YardReader, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[str] = []
    may_end, has_failed = threading.Event(), threading.Event()

    def slow(yard: PlayedYard) -> int:
        begun.append("slow")
        assert may_end.wait(WAIT_S)
        return 7

    def fail(yard: PlayedYard) -> int:
        begun.append("fail")
        assert has_failed.wait(WAIT_S)
        raise ValueError

    async def test() -> None:
        first, second = (asyncio.create_task(reader.shared("a", slow)) for _ in range(2))
        alone = asyncio.create_task(reader.shared("b", fail))
        await has_begun(begun, 2)
        for one in (first, alone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await one
        may_end.set()
        has_failed.set()
        assert await second == 7
        await asyncio.to_thread(eventually, lambda: not reader._open)
        await asyncio.sleep(0)  # what the threads have left to the loop
        reader.forget()
        gc.collect()

    asyncio.run(test())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_what_waits_too_long_is_refused_and_not_done_later(
    monkeypatch: pytest.MonkeyPatch, reader: YardReader
) -> None:
    begun: list[str] = []
    done: list[str] = []
    may_end = threading.Event()

    def slow(yard: PlayedYard) -> None:
        begun.append("slow")
        assert may_end.wait(WAIT_S)
        done.append("slow")

    async def test() -> None:
        busy = [asyncio.create_task(reader.run(slow)) for _ in range(2)]
        await has_begun(begun, 2)
        with monkeypatch.context() as patched:
            patched.setattr(reader, "_wait_s", 0.1)
            with pytest.raises(Busy):
                await reader.run(lambda yard: done.append("late"))
        may_end.set()
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
    monkeypatch: pytest.MonkeyPatch, broker: Server, bare: Yard
) -> None:
    # Given pages that stay fresh however long it takes to ask for them
    monkeypatch.setattr("tokenyard.board.reading._FRESH_S", 1000.0)
    reads = []

    def view(yard: PlayedYard, given: Parameters) -> dict[str, Any]:
        reads.append(given)
        return {"entries": [], "is_newest": True, "before": "", "most": 1}

    monkeypatch.setattr(app, "PAGES", [Page("/", "Yard", "audit.html", view)])
    with keyed(broker.url, bare) as door:
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
