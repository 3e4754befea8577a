"""OpenAI's Responses API: stored, in the background, and in turns, with OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.asked import PLACE
from tests.gateway.events import EventStream, data_of
from tests.gateway.stand import Door, Stand
from tests.support.waiting import eventually
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

SHORT: Final[dict[str, Any]] = {
    "model": "speaker",
    "input": "abc",
    "temperature": 0.0,
    "max_output_tokens": 8,
}
LONG: Final = SHORT | {"max_output_tokens": 250}
UNKNOWN: Final = "resp_" + "0" * 32
REFUSAL: Final = {"type": "refusal", "refusal": "no"}
EVENT: Final[TypeAdapter[Any]] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def other_sdk(other_door: Door) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{other_door.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@contextmanager
def paused(stand: Stand) -> Iterator[None]:
    """Nothing is generated in this block; what runs stays where it is."""
    signals = Signals(stand.plant)
    assert signals.wait(signals.give(Order(signal="PAUSE", mode="keep")), 60.0) == []
    try:
        yield
    finally:
        assert signals.wait(signals.give(Order(signal="UNPAUSE")), 60.0) == []


def finished(sdk: OpenAI, response_id: str) -> Response:
    """A response once it is over."""

    def look() -> Response | None:
        seen = sdk.responses.retrieve(response_id)
        return None if seen.status in ("queued", "in_progress") else seen

    found = eventually(look, timeout_s=60.0, every_s=0.05)
    assert found is not None
    return found


def test_a_response_is_the_same_on_another_gateway(door: Door, other_door: Door) -> None:
    with httpx.Client(timeout=60.0) as http:
        created = http.post(f"{door.url}/v1/responses", json=SHORT)
        path = f"/v1/responses/{created.json()['id']}"
        again = [http.get(one.url + path) for one in (door, other_door)]

    assert created.json()["output"][0]["content"][0]["text"] == "defghijk"
    assert [one.content for one in again] == [created.content] * 2


def test_a_streamed_response_is_read_whole_and_as_a_stream(sdk: OpenAI, other_sdk: OpenAI) -> None:
    events = list(sdk.responses.create(**SHORT, stream=True))
    last = events[-1]
    assert last.type == "response.completed"

    assert other_sdk.responses.retrieve(last.response.id) == last.response
    again = list(other_sdk.responses.retrieve(last.response.id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events]
    later = other_sdk.responses.retrieve(last.response.id, stream=True, starting_after=3)
    assert list(later) == events[4:]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_events_and_bodies_are_of_the_types_of_the_sdk(door: Door) -> None:
    body = SHORT | {"stream": True, "background": True}
    with EventStream(door.port, "/v1/responses", body) as stream:
        events = [data_of(event) for event in stream]
    for event in events:
        EVENT.validate_python(event)
    whole = httpx.get(f"{door.url}/v1/responses/{events[-1]['response']['id']}", timeout=60.0)
    Response.model_validate_json(whole.content)


def test_what_is_not_stored_cannot_be_read(sdk: OpenAI) -> None:
    made = sdk.responses.create(**SHORT, store=False)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)


def test_a_response_in_the_background_is_fetched_elsewhere(
    stand: Stand, sdk: OpenAI, other_sdk: OpenAI
) -> None:
    with paused(stand):
        made = sdk.responses.create(**SHORT, background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        waiting = other_sdk.responses.retrieve(made.id)
        assert waiting.status in ("queued", "in_progress")
        assert waiting.model_copy(update={"status": "queued"}) == made

    done = finished(other_sdk, made.id)
    assert (done.status, done.output_text) == ("incomplete", "defghijk")
    assert (done.background, done.created_at) == (True, made.created_at)


def test_a_response_in_the_background_is_watched_by_two(door: Door, other_door: Door) -> None:
    async def main() -> tuple[list[Any], list[Any], list[Any]]:
        first = AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0)
        second = AsyncOpenAI(base_url=f"{other_door.url}/v1", api_key="none", max_retries=0)
        async with first, second:
            stream = await first.responses.create(**LONG, background=True, stream=True)
            own = [await anext(stream)]
            name = own[0].response.id

            async def watch(sdk: AsyncOpenAI) -> list[Any]:
                return [one async for one in await sdk.responses.retrieve(name, stream=True)]

            # One of them is on the gateway that also answers the POST.
            watchers = asyncio.gather(watch(first), watch(second))
            own += [event async for event in stream]
            return own, *await watchers

    own, *watched = asyncio.run(main())
    assert len(own) > 200
    assert watched == [own, own]


def test_a_conversation_goes_on_from_gateway_to_gateway(sdk: OpenAI, other_sdk: OpenAI) -> None:
    first = sdk.responses.create(**SHORT, instructions="Count")
    second = other_sdk.responses.create(**SHORT | {"input": "X"}, previous_response_id=first.id)
    third = sdk.responses.create(
        **SHORT | {"input": [{"role": "user", "content": "5"}]},
        previous_response_id=second.id,
        stream=True,
    )
    last = list(third)[-1]
    assert last.type == "response.completed"

    said = [("user", "abc"), ("assistant", "defghijk"), ("user", "X"), ("assistant", "YZ012345")]
    said.append(("user", "5"))
    spelled = [{"role": role, "content": text} for role, text in said]
    explicit = sdk.responses.create(**SHORT | {"input": spelled})

    assert second.previous_response_id == first.id
    assert last.response.previous_response_id == second.id
    assert last.response.output_text == explicit.output_text == "6789é"
    assert last.response.usage is not None
    assert explicit.usage is not None
    assert last.response.usage.input_tokens == explicit.usage.input_tokens
    items = other_sdk.responses.input_items.list(last.response.id, order="asc").data
    assert [(one.role, one.content[0].text) for one in items] == said  # type: ignore[union-attr]


def test_a_conversation_carries_calls_of_tools(sdk: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": PLACE, "strict": True}
    made = sdk.responses.create(
        **LONG, tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    (call,) = (item for item in made.output if item.type == "function_call")
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    done = sdk.responses.create(**SHORT | {"input": [answer]}, previous_response_id=made.id)

    kinds = [item.type for item in sdk.responses.input_items.list(done.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]
    assert done.usage is not None
    assert made.usage is not None
    assert done.usage.input_tokens > made.usage.output_tokens


def test_input_items_come_in_pages(sdk: OpenAI, door: Door) -> None:
    said = [{"role": "user", "content": letter} for letter in "abcde"]
    made = sdk.responses.create(**SHORT | {"input": said})
    pages = sdk.responses.input_items.list(made.id, limit=2)
    texts = [item.content[0].text for item in pages]  # type: ignore[union-attr]
    assert texts == ["e", "d", "c", "b", "a"]  # over three pages

    listed = httpx.get(f"{door.url}/v1/responses/{made.id}/input_items").json()
    for item in listed["data"]:
        TypeAdapter(ResponseItem).validate_python(item)
    assert listed["has_more"] is False


@pytest.mark.parametrize("is_stream", [True, False])
def test_cancelling_ends_it_everywhere(
    stand: Stand, door: Door, other_sdk: OpenAI, sdk: OpenAI, is_stream: bool
) -> None:
    with paused(stand):
        if is_stream:
            with EventStream(
                door.port, "/v1/responses", LONG | {"background": True, "stream": True}
            ) as stream:
                events = iter(stream)
                name = data_of(next(events))["response"]["id"]
                assert other_sdk.responses.cancel(name).status == "cancelled"
                rest = [data_of(event) for event in events]
            assert rest[-1]["type"] == "response.incomplete"
            assert rest[-1]["response"]["status"] == "cancelled"
            EVENT.validate_python(rest[-1])
        else:
            name = sdk.responses.create(**LONG, background=True).id
            assert other_sdk.responses.cancel(name).status == "cancelled"
    assert sdk.responses.retrieve(name).status == "cancelled"
    assert sdk.responses.cancel(name) == other_sdk.responses.retrieve(name)  # once more
    streams = [list(one.responses.retrieve(name, stream=True)) for one in (sdk, other_sdk)]
    assert streams[0] == streams[1]
    assert streams[0][-1].response.status == "cancelled"


def test_only_what_is_in_the_background_is_cancelled(sdk: OpenAI) -> None:
    made = sdk.responses.create(**SHORT)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        sdk.responses.cancel(made.id)


def test_a_deleted_response_is_gone_and_its_request_cancelled(
    stand: Stand, sdk: OpenAI, other_sdk: OpenAI
) -> None:
    with paused(stand):
        made = sdk.responses.create(**SHORT, background=True)
        other_sdk.responses.delete(made.id)
    for one in (sdk, other_sdk):
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(made.id)
    (ledger,) = stand.plant.connection.scan_iter(match=f"*request:*/{made.id}_0", count=1000)
    assert stand.plant.connection.hget(ledger, "state") == b"cancelled"


def test_a_response_of_another_client_is_not_found(stand: Stand, sdk: OpenAI) -> None:
    made = sdk.responses.create(**SHORT)
    (key,) = stand.plant.connection.scan_iter(match=f"*response:*/{made.id[5:]}", count=1000)
    stand.plant.connection.rename(key, key.replace(b"response:", b"response:x", 1))
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)


def test_a_full_queue_refuses_at_once(stand: Stand, sdk: OpenAI) -> None:
    connection, info = stand.plant.connection, stand.plant.keys.info
    most = connection.hget(info, "max_num_queued_reqs") or b"0"
    with paused(stand):
        kept = sdk.responses.create(**SHORT, background=True)
        connection.hset(info, "max_num_queued_reqs", "1")
        try:
            before = set(connection.scan_iter(match="*response:*", count=1000))
            for options in ({}, {"stream": True}):
                with pytest.raises(openai.RateLimitError):
                    sdk.responses.create(**SHORT, background=True, **options)
            # What was stored before the refusal goes behind it.
            eventually(lambda: set(connection.scan_iter(match="*response:*", count=1000)) == before)
        finally:
            connection.hset(info, "max_num_queued_reqs", most)
    assert finished(sdk, kept.id).output_text == "defghijk"


def test_a_retried_response_in_the_background_runs_once(sdk: OpenAI, other_sdk: OpenAI) -> None:
    keyed: dict[str, Any] = {"extra_headers": {"Idempotency-Key": "once more"}}
    first = sdk.responses.create(**SHORT, background=True, **keyed)
    assert other_sdk.responses.create(**SHORT, background=True, **keyed) == first
    with pytest.raises(openai.UnprocessableEntityError):
        sdk.responses.create(**LONG, background=True, **keyed)


@pytest.mark.parametrize(
    "name",
    ["x", UNKNOWN, UNKNOWN.upper(), "resp_%00", "..%2f..%2fmodels", "resp_" + "é" * 32, "a" * 5000],
)
def test_hostile_ids_are_not_found(door: Door, name: str) -> None:
    with httpx.Client(base_url=f"{door.url}/v1/responses/", timeout=60.0) as http:
        answers = [
            http.get(name),
            http.get(name, params={"stream": "true"}),
            http.get(f"{name}/input_items"),
            http.post(f"{name}/cancel"),
            http.delete(name),
        ]
    assert {one.status_code for one in answers} == {404}
    assert all(one.json()["error"]["message"] for one in answers)


@pytest.mark.parametrize(
    "query",
    [
        *("stream=maybe", "stream=true&starting_after=-1", "stream=true&starting_after=1e3"),
        *("stream=true&starting_after=", "stream=true&starting_after=" + "9" * 40, "stream=%ff"),
    ],
)
def test_hostile_queries_are_refused(door: Door, query: str) -> None:
    made = httpx.post(f"{door.url}/v1/responses", json=SHORT | {"background": True}, timeout=60.0)
    url = f"{door.url}/v1/responses/{made.json()['id']}?{query}"
    assert httpx.get(url, timeout=60.0).status_code == 400


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_x"])
def test_hostile_pages_are_refused(door: Door, query: str) -> None:
    made = httpx.post(f"{door.url}/v1/responses", json=SHORT, timeout=60.0).json()
    url = f"{door.url}/v1/responses/{made['id']}/input_items?{query}"
    assert httpx.get(url).status_code == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"background": "yes"},
        {"stream": 1},
        {"store": "no"},
        {"background": True, "store": False},
        {"previous_response_id": 5},
        {"previous_response_id": UNKNOWN},
        {"previous_response_id": "\ud800"},
        {"previous_response_id": UNKNOWN, "input": {"a": 1}},
        {"input": 5, "background": True},
        {"input": [{"type": ["message"]}], "background": True},
        {"input": [5]},
        {"instructions": "\ud800"},
        {"metadata": {"a": float("nan")}, "background": True},
        {"tools": [{"type": "function", "name": "f", "parameters": {"a": float("inf")}}]},
        {"max_output_tokens": 10**30, "background": True},
        {"prompt": {"id": "x"}, "background": True},
        # At these vLLM's front end fails: two while it renders the prompt, two behind the head.
        {"input": [{"type": "message", "role": "assistant", "content": []}]},
        {"input": [{"type": "message", "role": "assistant", "content": [REFUSAL]}]},
        {"stop_token_ids": [-1]},
        {"structured_outputs": {"regex": "("}},
    ],
)
def test_hostile_bodies_are_refused(door: Door, wrong: dict[str, Any]) -> None:
    with httpx.Client(timeout=60.0) as http:
        for way in ({}, {"stream": True}, {"background": True}):
            sent = json.dumps(SHORT | way | wrong)
            kind = {"content-type": "application/json"}
            found = http.post(f"{door.url}/v1/responses", content=sent, headers=kind)
            assert found.status_code == 400, found.text
            assert found.json()["error"]["message"]
