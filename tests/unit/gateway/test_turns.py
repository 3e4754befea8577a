"""Several answers of one stream come in turns, however fast each of them is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gateway.frontend.derived import merge_in_turns


async def answer(name: str, count: int, pauses: int) -> AsyncGenerator[str, None]:
    for number in range(count):
        for _ in range(pauses):
            await asyncio.sleep(0)
        yield f"{name}{number}"


def merged(*pauses: int) -> list[tuple[int, str]]:
    async def collect() -> list[tuple[int, str]]:
        answers = [answer("abc"[at], at + 2, pause) for at, pause in enumerate(pauses)]
        return [one async for one in merge_in_turns(*answers)]

    return asyncio.run(collect())


def test_the_order_does_not_depend_on_the_speed() -> None:
    expected = [
        *((0, "a0"), (1, "b0"), (2, "c0"), (0, "a1"), (1, "b1")),
        *((2, "c1"), (1, "b2"), (2, "c2"), (2, "c3")),
    ]

    assert merged(0, 0, 0) == merged(9, 0, 3) == merged(0, 7, 1) == expected


def test_a_single_answer_needs_no_task() -> None:
    async def tasks() -> set[int]:
        return {len(asyncio.all_tasks()) async for _ in merge_in_turns(answer("a", 3, 1))}

    assert asyncio.run(tasks()) == {1}


@pytest.mark.parametrize("names", ["a", "ab"])
def test_who_stops_early_closes_all(names: str) -> None:
    ended = []

    async def endless(name: str) -> AsyncGenerator[str, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield name
        finally:
            ended.append(name)

    async def take_one() -> None:
        merging = merge_in_turns(*map(endless, names))
        await anext(merging)
        await merging.aclose()

    asyncio.run(take_one())

    assert sorted(ended) == sorted(names)
