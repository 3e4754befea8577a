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


async def merged(*pauses: int) -> list[tuple[int, str]]:
    answers = [answer("abc"[at], at + 2, pause) for at, pause in enumerate(pauses)]
    return [one async for one in merge_in_turns(*answers)]


async def test_the_order_does_not_depend_on_the_speed() -> None:
    expected = [
        *((0, "a0"), (1, "b0"), (2, "c0"), (0, "a1"), (1, "b1")),
        *((2, "c1"), (1, "b2"), (2, "c2"), (2, "c3")),
    ]

    assert await merged(0, 0, 0) == await merged(9, 0, 3) == await merged(0, 7, 1) == expected


async def test_a_single_answer_needs_no_task() -> None:
    merging = merge_in_turns(answer("a", 3, 1))

    assert {len(asyncio.all_tasks()) async for _ in merging} == {1}


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_who_stops_early_closes_all(names: str) -> None:
    ended = []

    async def endless(name: str) -> AsyncGenerator[str, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield name
        finally:
            ended.append(name)

    merging = merge_in_turns(*map(endless, names))
    await anext(merging)
    await merging.aclose()

    assert sorted(ended) == sorted(names)
