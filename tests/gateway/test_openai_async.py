"""OpenAI's asynchronous SDK: many at once, streams left early, and batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from openai import AsyncOpenAI

from tests.batch.running import start
from tests.gateway.asked import NAMED, OTHER_TOOL, TOOL, Place, say
from tests.gateway.speaker import CYCLE, text_behind
from tests.gateway.stand import Door, Stand

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


def test_tools_and_formats_come_whole(door: Door) -> None:
    async def ask() -> tuple[str, Place | None, Place | None]:
        options: Any = {"model": "speaker", "temperature": 0}
        chat = options | {"messages": say("where"), "max_tokens": 200}
        async with connected(door) as sdk:
            called, parsed, responded = await asyncio.gather(
                sdk.chat.completions.create(**chat, tools=[TOOL, OTHER_TOOL], tool_choice=NAMED),
                sdk.chat.completions.parse(**chat, response_format=Place),
                sdk.responses.parse(
                    **options, input="where", max_output_tokens=200, text_format=Place
                ),
            )
        (call,) = called.choices[0].message.tool_calls or []
        assert call.type == "function"
        Place.model_validate_json(call.function.arguments)
        return call.function.name, parsed.choices[0].message.parsed, responded.output_parsed

    name, parsed, responded = run(ask())

    assert name == "get_weather"
    assert isinstance(parsed, Place)
    assert isinstance(responded, Place)


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


def test_a_batch_is_run_from_its_file_to_its_results(
    stand: Stand, door: Door, tmp_path: Path
) -> None:
    def line(name: str, prompt: str) -> str:
        body = {"model": "adder", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return json.dumps(
            {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
        )

    async def ask() -> dict[str, str]:
        text = "\n".join([line("a", "12+34="), line("b", "30+33=")])
        async with connected(door) as sdk:
            file = await sdk.files.create(file=("in.jsonl", text.encode()), purpose="batch")
            batch = await sdk.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            while (batch := await sdk.batches.retrieve(batch.id)).status != "completed":
                assert batch.status in {"validating", "in_progress", "finalizing"}
                await asyncio.sleep(0.1)
            found = (await sdk.files.content(str(batch.output_file_id))).text
            await sdk.files.delete(file.id)
            with pytest.raises(openai.NotFoundError):
                await sdk.files.retrieve(file.id)
        lines = [json.loads(one) for one in found.splitlines()]
        return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in lines}

    worker = start(stand.plant, tmp_path / "worker.log", "worker")
    try:
        assert run(ask()) == {"a": "46", "b": "63"}
    finally:
        worker.kill()
        worker.wait()
