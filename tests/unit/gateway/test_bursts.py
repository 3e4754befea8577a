"""Bursts: what is asked for while a call is under way shares the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.queue.calls import Bursts
from tokenyard.protocol.errors import BrokerUnavailable

pytestmark = pytest.mark.timeout(30)


async def test_what_comes_during_a_call_shares_the_next() -> None:
    sizes: list[int] = []
    is_sent, may_end = asyncio.Event(), asyncio.Event()

    async def send(items: Sequence[int]) -> list[str]:
        sizes.append(len(items))
        is_sent.set()
        await may_end.wait()
        return [str(item) for item in items]

    bursts = Bursts(send)
    first = asyncio.create_task(bursts.ask(0))
    await is_sent.wait()
    rest = [asyncio.create_task(bursts.ask(number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    rest[1].cancel()  # its client has gone
    may_end.set()
    found = await asyncio.gather(first, *rest, return_exceptions=True)

    assert isinstance(found.pop(2), asyncio.CancelledError)
    assert found == ["0", "1", "3", "4", "5"]
    assert sizes == [1, 5]


async def test_a_call_that_fails_fails_all_of_its_burst() -> None:
    async def send(items: Sequence[int]) -> list[str]:
        raise BrokerUnavailable("away")

    found = await asyncio.gather(*map(Bursts(send).ask, range(3)), return_exceptions=True)

    assert [type(one) for one in found] == [BrokerUnavailable] * 3
