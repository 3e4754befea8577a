"""Ids and times of answers, derived from the request.

vLLM draws ids (``call_...``, ``msg_...``) and signatures of thoughts at random and takes
``created`` from the clock. Two gateways that render the same request must write the same bytes, so
all come from its `RequestContext` here. `install` must run before vLLM's entry points are imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import ModuleType
from typing import Any, Final, TypeVar

from gateway.http.context import CURRENT
from tokenyard import clock
from tokenyard.process.home import cache_environment

_PACKAGES: Final = ("vllm.entrypoints.", "vllm.parser", "vllm.tool_parsers", "vllm.renderers")


def module_with(module: ModuleType, **own: Any) -> ModuleType:
    """A copy of a module, with members of our own in the place of some."""
    made = ModuleType(module.__name__)
    vars(made).update(vars(module), **own)
    return made


def _time() -> float:
    """Unix seconds, which stand still while a request is served."""
    context = CURRENT.get()
    return clock.wall() if context is None else context.created


def _uuid4() -> uuid.UUID:
    """128 bits; of those drawn while a request is served, it decides on all."""
    context = CURRENT.get()
    if context is None:
        return uuid.uuid4()
    return uuid.UUID(hex=context.draw_id() + context.draw_id())


_REPLACED: Final = (
    (time, module_with(time, time=_time)),
    (uuid, module_with(uuid, uuid4=_uuid4)),
)


def install() -> None:
    """Replace vLLM's source of ids, once; raises `RuntimeError` where it is too late."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "0"  # nothing is computed here
    for name, value in {"VLLM_LOGGING_LEVEL": "WARNING", **cache_environment()}.items():
        os.environ.setdefault(name, value)
    import vllm.utils
    import vllm.utils.async_utils

    if vllm.utils.async_utils.merge_async_iterators is merge_in_turns:
        return
    if any(name.startswith("vllm.entrypoints.openai") for name in sys.modules):
        raise RuntimeError("vLLM's entry points were imported before their ids were replaced")
    original = vllm.utils.random_uuid

    def derived_id() -> str:
        context = CURRENT.get()
        return original() if context is None else context.draw_id()

    vllm.utils.random_uuid = derived_id
    vllm.utils.async_utils.merge_async_iterators = merge_in_turns


def replace_modules() -> None:
    """Give the imported entry points the derived clock and the derived ``uuid``."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(_PACKAGES):
            continue
        for real, own in _REPLACED:
            if getattr(module, real.__name__, None) is real:
                setattr(module, real.__name__, own)


# Several answers in one stream, in an order that depends on nothing but them.

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
