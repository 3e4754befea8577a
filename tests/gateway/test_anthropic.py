"""Anthropic's SDK against a gateway before real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import ErrorResponse

from tests.gateway.asked import PLACE
from tests.gateway.speaker import text_behind
from tests.gateway.stand import Door

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
TOOL: Final[Any] = {"name": "get_weather", "strict": True, "input_schema": PLACE}
ASKED: Final[dict[str, Any]] = {
    "model": "speaker",
    "max_tokens": 40,
    "messages": [{"role": "user", "content": "abc"}],
    # The SDK's newest version does not know it.
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def sdk(door: Door) -> Iterator[Anthropic]:
    with Anthropic(base_url=door.url, api_key="none", timeout=90.0, max_retries=0) as client:
        yield client


def test_a_message_is_answered(sdk: Anthropic) -> None:
    done = sdk.messages.create(**ASKED, system="Be brief")

    assert [block.text for block in done.content if block.type == "text"] == [text_behind("c", 40)]
    assert done.stop_reason == "max_tokens"
    assert done.usage.output_tokens == 40


def test_a_message_is_streamed(sdk: Anthropic) -> None:
    with sdk.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert text == text_behind("c", 40)
    assert final.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "named"]
)
def test_a_tool_is_called(sdk: Anthropic, choice: Any) -> None:
    options = ASKED | {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    done = sdk.messages.create(**options)
    with sdk.messages.stream(**options) as stream:
        final = stream.get_final_message()
    (call,) = [block for block in done.content if block.type == "tool_use"]
    (streamed,) = [block for block in final.content if block.type == "tool_use"]

    assert call.name == streamed.name == "get_weather"
    assert call.input == streamed.input
    assert set(call.input) == {"city", "unit"}
    assert done.stop_reason == "tool_use"


def test_a_stop_sequence_is_named(sdk: Anthropic) -> None:
    done = sdk.messages.create(**ASKED, stop_sequences=["jk"])

    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", "jk")
    assert [block.text for block in done.content if block.type == "text"] == ["defghi"]


def test_the_asynchronous_sdk_reads_streams_beside_each_other(door: Door) -> None:
    async def ask(sdk: AsyncAnthropic, letter: str) -> str:
        asked = ASKED | {"messages": [{"role": "user", "content": letter}]}
        async with sdk.messages.stream(**asked) as stream:
            return await stream.get_final_text()

    async def ask_all() -> list[str]:
        async with AsyncAnthropic(base_url=door.url, api_key="none", max_retries=0) as sdk:
            return await asyncio.gather(*(ask(sdk, letter) for letter in "aQ5"))

    assert asyncio.run(ask_all()) == [text_behind(letter, 40) for letter in "aQ5"]


def test_tokens_are_counted_as_they_are_used(sdk: Anthropic) -> None:
    counted = sdk.messages.count_tokens(model="speaker", messages=ASKED["messages"])

    assert counted.input_tokens == sdk.messages.create(**ASKED).usage.input_tokens


def test_errors_have_their_classes(sdk: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(**ASKED | {"model": "divider"})
    with pytest.raises(anthropic.BadRequestError):
        sdk.messages.create(**ASKED | {"max_tokens": 5000})
    with pytest.raises(anthropic.BadRequestError):
        sdk.messages.create(**ASKED | {"extra_body": {"temperature": -1.0}})


BAD: Final[dict[str, dict[str, Any]]] = {
    "body": {"messages": "abc"},  # found by the endpoint
    "length": {"max_tokens": 5000},  # by the front end
    "schema": {"tools": [TOOL | {"input_schema": {"type": "nothing"}}]},  # by the grammar
    "model": {"model": "divider"},  # by the gateway
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", BAD)
def test_every_refusal_has_the_form_that_the_sdk_reads(
    sdk: Anthropic, fault: str, stream: bool
) -> None:
    options = ASKED | {"tool_choice": {"type": "any"}, "tools": [TOOL], "stream": stream}
    with pytest.raises(anthropic.APIStatusError) as refused:
        sdk.messages.create(**options | BAD[fault])

    check_form(refused.value, 404 if fault == "model" else 400)


def check_form(error: anthropic.APIStatusError, status: int) -> None:
    body = ErrorResponse.model_validate(error.body)
    assert error.status_code == status
    assert error.type == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert body.error.message
    assert body.request_id == error.request_id == error.response.headers["request-id"]


@pytest.mark.parametrize("fault", ["body", "model"])
def test_a_refusal_to_count_has_the_same_form(sdk: Anthropic, fault: str) -> None:
    options: Any = {"model": "speaker", "messages": ASKED["messages"]} | BAD[fault]
    with pytest.raises(anthropic.APIStatusError) as refused:
        sdk.messages.count_tokens(**options)

    check_form(refused.value, 404 if fault == "model" else 400)


def test_an_answer_tells_the_id_of_its_request(sdk: Anthropic) -> None:
    done = sdk.messages.with_raw_response.create(**ASKED | {"max_tokens": 1})

    assert done.parse()._request_id == done.headers["x-request-id"]
