"""OpenAI's SDK against a gateway before real vLLM."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.gateway.asked import NAMED, OTHER_TOOL, PLACE, TOOL, Place, say
from tests.gateway.speaker import text_behind

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_models_are_listed(sdk: OpenAI) -> None:
    assert {"adder", "subtractor", "speaker"} <= {model.id for model in sdk.models.list()}


@pytest.mark.parametrize(
    ("model", "ask", "answer"), [("adder", "12+34=", "46"), ("subtractor", "75-48=", "27")]
)
def test_each_model_answers_its_own(sdk: OpenAI, model: str, ask: str, answer: str) -> None:
    done = sdk.completions.create(model=model, prompt=ask, max_tokens=8, temperature=0)

    assert (done.choices[0].text, done.choices[0].finish_reason) == (answer, "stop")
    assert done.usage is not None
    assert done.usage.prompt_tokens == 6
    assert done.model == model


def test_a_list_of_prompts_has_a_choice_for_each(sdk: OpenAI) -> None:
    asked = ["10+11=", "20+22=", "30+33=", "40+44="]
    done = sdk.completions.create(model="adder", prompt=asked, max_tokens=8, temperature=0)
    pieces: dict[int, str] = dict.fromkeys(range(4), "")
    for chunk in sdk.completions.create(
        model="adder", prompt=asked, max_tokens=8, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text

    assert [choice.text for choice in done.choices] == ["21", "42", "63", "84"]
    assert list(pieces.values()) == ["21", "42", "63", "84"]


def test_a_prompt_may_be_tokens(sdk: OpenAI) -> None:
    done = sdk.completions.create(
        model="adder", prompt=[5, 6, 14, 7, 8, 16], max_tokens=8, temperature=0
    )

    assert done.choices[0].text == "46"


def test_a_stream_adds_up_and_ends_with_its_usage(sdk: OpenAI) -> None:
    stream = sdk.completions.create(
        model="speaker",
        prompt="0abc",
        max_tokens=100,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)

    assert text == text_behind("c", 100)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 100


def test_logprobs_of_completions(sdk: OpenAI) -> None:
    done = sdk.completions.create(
        model="speaker", prompt="abc", max_tokens=5, temperature=0, logprobs=3, echo=False
    )
    (choice,) = done.choices

    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("defgh")
    assert choice.logprobs.token_logprobs is not None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    assert choice.logprobs.top_logprobs is not None
    assert all(len(top) in {3, 4} for top in choice.logprobs.top_logprobs)


def test_several_seeded_choices_are_the_same_twice(sdk: OpenAI) -> None:
    def drawn(seed: int) -> list[str]:
        done = sdk.chat.completions.create(
            model="speaker",
            messages=say("xyz"),
            n=3,
            seed=seed,
            temperature=2.0,
            max_tokens=16,
            extra_body={"ignore_eos": True},
        )
        return [choice.message.content or "" for choice in done.choices]

    first, again, other = drawn(1), drawn(1), drawn(2)

    assert len(set(first)) == 3
    assert first == again != other


def test_a_stop_ends_the_text(sdk: OpenAI) -> None:
    options: Any = {"model": "speaker", "messages": say("abc"), "max_tokens": 30, "temperature": 0}
    done = sdk.chat.completions.create(**options, stop=["jk", "é"])
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in sdk.chat.completions.create(**options, stop=["jk", "é"], stream=True)
    )

    assert done.choices[0].message.content == streamed == "defghi"
    assert done.choices[0].finish_reason == "stop"


def test_chat_with_logprobs_and_a_streaming_helper(sdk: OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="speaker",
        messages=say("7"),
        stop="é",
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    (choice,) = final.choices

    assert choice.message.content == "89"
    assert kinds.count("content.delta") >= 2
    assert "logprobs.content.done" in kinds
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [one.token for one in choice.logprobs.content[:2]] == ["8", "9"]
    assert final.usage is not None
    assert final.usage.completion_tokens == len(choice.logprobs.content)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_is_called(sdk: OpenAI, choice: Any) -> None:
    options: Any = {
        "model": "speaker",
        "messages": say("weather"),
        "tools": [TOOL] if choice == "required" else [TOOL, OTHER_TOOL],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 200,
    }
    done = sdk.chat.completions.create(**options)
    (call,) = done.choices[0].message.tool_calls or []
    with sdk.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []

    assert call.type == "function"
    assert call.function.name == streamed.function.name == "get_weather"
    assert json.loads(call.function.arguments) == json.loads(streamed.function.arguments)
    assert json.loads(call.function.arguments)["unit"] in {"celsius", "fahrenheit"}
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    # As in OpenAI's API, a call that was demanded by name is no reason of its own.
    assert done.choices[0].finish_reason in {"tool_calls", "stop"}


def test_a_chat_goes_on_behind_a_tools_answer(sdk: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages: Any = [
        *say("time?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    done = sdk.chat.completions.create(
        model="speaker", messages=messages, tools=[OTHER_TOOL], tool_choice="none",
        temperature=0, max_tokens=4,
    )  # fmt: skip

    assert done.choices[0].message.content == text_behind("n", 4)


def test_response_format_is_obeyed(sdk: OpenAI) -> None:
    done = sdk.chat.completions.create(
        model="speaker",
        messages=say("where"),
        temperature=0,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}},
    )

    Place.model_validate_json(done.choices[0].message.content or "")


def test_pydantic_parses_what_comes(sdk: OpenAI) -> None:
    options: Any = {"model": "speaker", "messages": say("where"), "temperature": 0}
    done = sdk.chat.completions.parse(**options, max_tokens=200, response_format=Place)
    with sdk.chat.completions.stream(**options, max_tokens=200, response_format=Place) as stream:
        final = stream.get_final_completion()

    assert done.choices[0].message.parsed == final.choices[0].message.parsed
    assert isinstance(done.choices[0].message.parsed, Place)


def test_responses_are_whole_and_streamed(sdk: OpenAI) -> None:
    options: Any = {"model": "speaker", "input": "abc", "temperature": 0, "max_output_tokens": 40}
    done = sdk.responses.create(**options)
    with sdk.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert done.output_text == final.output_text == text_behind("c", 40)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert done.id != final.id


def test_pydantic_parses_responses(sdk: OpenAI) -> None:
    options: Any = {"model": "speaker", "input": "where", "temperature": 0}
    done = sdk.responses.parse(**options, max_output_tokens=200, text_format=Place)
    with sdk.responses.stream(**options, max_output_tokens=200, text_format=Place) as stream:
        final = stream.get_final_response()

    assert done.output_parsed == final.output_parsed
    assert isinstance(done.output_parsed, Place)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_response_calls_a_tool(sdk: OpenAI, choice: Any) -> None:
    options: Any = {
        "model": "speaker",
        "input": "weather",
        "tools": [{"type": "function", **TOOL["function"]}],
        "tool_choice": choice,
        "temperature": 0,
        "max_output_tokens": 200,
    }
    done = sdk.responses.create(**options)
    with sdk.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    calls = [item for made in (done, final) for item in made.output if item.type == "function_call"]

    assert [call.name for call in calls] == ["get_weather"] * 2
    whole, streamed = (Place.model_validate_json(call.arguments) for call in calls)
    assert whole == streamed
    assert kinds.count("response.function_call_arguments.delta") > 3


def test_a_model_that_nobody_has_is_not_found(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        sdk.completions.create(model="divider", prompt="1")

    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"max_tokens": 5000}, {"n": 0}, {"logit_bias": {"70000": 1}}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_parameters_are_bad_requests(sdk: OpenAI, options: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="speaker", messages=say("a"), stream=stream, **options)

    assert refused.value.type is not None
