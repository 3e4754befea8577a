"""OpenAI's asynchronous SDK: many at once, and streams left early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from openai import AsyncOpenAI

from tests.gateway.asked import TOOL, say
from tests.gateway.speaker import CYCLE, text_behind
from tests.gateway.stand import Door

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
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


def test_tools_and_responses_stream_beside_each_other(door: Door) -> None:
    async def call(sdk: AsyncOpenAI) -> str:
        async with sdk.chat.completions.stream(
            model="speaker", messages=say("w"), tools=[TOOL], tool_choice="required",
            temperature=0, max_tokens=200,
        ) as stream:  # fmt: skip
            final = await stream.get_final_completion()
        (found,) = final.choices[0].message.tool_calls or []
        return found.function.name

    async def respond(sdk: AsyncOpenAI) -> str:
        async with sdk.responses.stream(
            model="speaker", input="abc", temperature=0, max_output_tokens=40
        ) as stream:
            return (await stream.get_final_response()).output_text

    async def both() -> tuple[str, str]:
        async with connected(door) as sdk:
            return tuple(await asyncio.gather(call(sdk), respond(sdk)))

    assert run(both()) == ("get_weather", text_behind("c", 40))
