"""OpenAI's asynchronous SDK: many at once, and streams left early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from openai import AsyncOpenAI

from tests.gateway.asked import say
from tests.gateway.speaker import CYCLE, text_behind
from tests.gateway.stand import Door

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]
T = TypeVar("T")


def connected(door: Door) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", timeout=120.0, max_retries=0)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_many_streams_at_once_do_not_mix(door: Door) -> None:
    letters = CYCLE[:40]

    async def ask(sdk: AsyncOpenAI, letter: str) -> str:
        stream = await sdk.chat.completions.create(
            model="speaker", messages=say(letter), temperature=0, max_tokens=50, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with connected(door) as sdk:
            return await asyncio.gather(*(ask(sdk, letter) for letter in letters))

    assert run(ask_all()) == [text_behind(letter, 50) for letter in letters]


def test_a_stream_in_the_background_is_left_and_resumed(door: Door, other_door: Door) -> None:
    async def ask() -> tuple[list[Any], list[Any]]:
        async with connected(door) as sdk, connected(other_door) as other:
            stream = await sdk.responses.create(
                model="speaker", input="abc", temperature=0, max_output_tokens=400,
                background=True, stream=True,
            )  # fmt: skip
            seen = []
            async for event in stream:
                seen.append(event)
                if len(seen) == 20:
                    break
            await stream.close()
            assert seen[0].type == "response.created"
            last = seen[-1].sequence_number
            name = seen[0].response.id
            rest = await other.responses.retrieve(name, stream=True, starting_after=last)
            seen += [event async for event in rest]
            whole = await other.responses.retrieve(name, stream=True)
            return seen, [event async for event in whole]

    resumed, whole = run(ask())

    assert resumed == whole
    assert resumed[-1].response.output_text == text_behind("c", 400)
