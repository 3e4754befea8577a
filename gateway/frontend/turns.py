"""Several answers in one stream, in an order that depends on nothing but them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge_in_turns(
    *iterators: AsyncGenerator[T, None],
) -> AsyncGenerator[tuple[int, T], None]:
    """Like vLLM's `merge_async_iterators`, but each iterator yields one item in its turn.

    vLLM takes the items as they come: another gateway would render a list of prompts in another
    order. All run at the same time; only the order of what they yield is fixed.
    """
    if len(iterators) == 1:  # no task for each token
        async with aclosing(iterators[0]) as alone:
            async for item in alone:
                yield 0, item
        return
    loop = asyncio.get_running_loop()
    turns = {index: loop.create_task(_next(one)) for index, one in enumerate(iterators)}
    try:
        while turns:
            for index, task in list(turns.items()):
                try:
                    item = await task
                except StopAsyncIteration:
                    del turns[index]
                    continue
                turns[index] = loop.create_task(_next(iterators[index]))
                yield index, item
    finally:
        for index, task in turns.items():
            task.cancel()
            with contextlib.suppress(BaseException):
                await task
            with contextlib.suppress(BaseException):
                await iterators[index].aclose()


async def _next(iterator: AsyncGenerator[T, None]) -> T:
    return await anext(iterator)
