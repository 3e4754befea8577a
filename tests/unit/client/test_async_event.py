"""Waits that end with news or with their bound, whichever is first."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

import pytest

from tests.support.builders import make_delta
from tokenyard.client.aio import AsyncClient, AsyncEvent, AsyncHandle
from tokenyard.client.pending import PendingRequest

FOR_EVER_S = 3600.0
SHORT_S = 60.0


class FakeSelector(selectors.DefaultSelector):
    """Lets the time of its loop pass where it would wait for it."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0 if timeout is not None else None)


class FakeLoop(asyncio.SelectorEventLoop):
    """A loop whose timers fire as soon as nothing else is to be done."""

    def __init__(self) -> None:
        self._fake_selector = FakeSelector()
        super().__init__(self._fake_selector)

    def time(self) -> float:
        return self._fake_selector.now


@pytest.fixture(autouse=True)
def loop_factory() -> type[FakeLoop]:
    return FakeLoop


async def test_news_end_a_wait() -> None:
    news = AsyncEvent()
    asyncio.get_running_loop().call_soon(news.set)
    await news.wait(FOR_EVER_S)


async def test_an_event_set_before_the_wait_ends_it_until_it_is_cleared() -> None:
    news = AsyncEvent()
    news.set()
    await news.wait(FOR_EVER_S)
    await news.wait(FOR_EVER_S)
    news.clear()
    wait = asyncio.create_task(news.wait(FOR_EVER_S))
    await asyncio.sleep(0)
    assert not wait.done()
    news.set()
    await wait


@pytest.mark.parametrize("before_s", [FOR_EVER_S, SHORT_S / 10])
async def test_each_wait_has_its_own_bound(before_s: float) -> None:
    news = AsyncEvent()
    # Given a wait with another bound, longer or shorter, that news have ended
    loop = asyncio.get_running_loop()
    loop.call_soon(news.set)
    await news.wait(before_s)
    news.clear()

    # I expect the next to end at its own, and no earlier.
    began = loop.time()
    await news.wait(SHORT_S)
    assert loop.time() - began == pytest.approx(SHORT_S)


async def test_without_any_time_nobody_waits() -> None:
    news = AsyncEvent()
    await news.wait(0.0)


async def test_a_wait_that_was_cancelled_leaves_nothing_behind() -> None:
    news = AsyncEvent()
    wait = asyncio.create_task(news.wait(FOR_EVER_S))
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    news.set()
    await news.wait(FOR_EVER_S)


async def test_one_timer_serves_many_waits() -> None:
    news = AsyncEvent()
    loop = asyncio.get_running_loop()
    made: list[float] = []
    call_at = loop.call_at

    def counted(when: float, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        made.append(when)
        return call_at(when, *arguments, **options)

    loop.call_at = counted  # type: ignore[method-assign]
    for _ in range(100):
        loop.call_soon(news.set)
        await news.wait(FOR_EVER_S)
        news.clear()
    assert len(made) == 1


async def test_a_stream_hears_its_exchange_until_its_reader_leaves() -> None:
    # Given a reader who waits for a stream
    pending = PendingRequest("q", None, 0.0)
    pieces = aiter(AsyncHandle(AsyncClient("redis://127.0.0.1:1/0"), pending))
    first = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)

    # If something comes, I expect it to be read, and once.
    pending.take(make_delta("q", 0, [5]), 1.0)
    assert (await first).tokens == [5]
    second = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    assert not second.done()

    # If the reader leaves, I expect the exchange to tell nobody.
    second.cancel()
    await asyncio.wait([second])
    assert not pending.listeners
