"""Requests that a gateway and vLLM's own server are both asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.gateway.alike import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.gateway.asked import LONG_TOOL, NAMED, OTHER_TOOL, PLACE, TOOL, say

Case = tuple[str, dict[str, Any]]
#: A call in the words of the parser `hermes`, which a grammar puts into the model's mouth.
CALL: Final = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "abc", "unit": "celsius"}}\n'
    "</tool_call>"
)
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
#: The tool in the form of the Responses API, and in Anthropic's.
FLAT: Final = {"type": "function", **TOOL["function"]}
SCHEMED: Final = {"name": "get_weather", "strict": True, "input_schema": PLACE}
TURNS: Final = [
    *say("time?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_time", "arguments": '{"zone": "utc"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]


def _completions(**body: Any) -> Case:
    return COMPLETIONS, {"prompt": "abc", "max_tokens": 20} | body


def _chat(**body: Any) -> Case:
    return CHAT, {"messages": say("abc"), "max_tokens": 20} | body


def _responses(**body: Any) -> Case:
    return RESPONSES, {"input": "abc", "max_output_tokens": 20} | body


def _messages(**body: Any) -> Case:
    return MESSAGES, {"messages": say("abc"), "max_tokens": 20} | body


#: Answered whole and streamed.
GENERATED: Final[Mapping[str, Case]] = {
    "completion": _completions(),
    "completion-tier": _completions(service_tier="standard_only"),
    "completion-of-tokens": _completions(prompt=[102, 103], return_token_ids=True),
    "completions-of-prompts": _completions(prompt=["abc", "xyz"], logprobs=3),
    "completions-of-tokens": _completions(prompt=[[102, 103], [104]], n=2, seed=5, temperature=1),
    "completion-echo": _completions(echo=True),
    "completion-echo-logprobs": _completions(echo=True, logprobs=2),
    "completion-echo-alone": _completions(echo=True, logprobs=1, max_tokens=0),
    "completion-logprobs": _completions(prompt="8", logprobs=5, ignore_eos=True),
    "completion-logprobs-as-ids": _completions(logprobs=0, return_tokens_as_token_ids=True),
    "completion-stop": _completions(stop=["jkl", "ij"]),
    "completion-stop-shown": _completions(stop="ij", include_stop_str_in_output=True, logprobs=1),
    "completion-stop-token": _completions(stop_token_ids=[5 + ord("g")]),
    "completion-wide-letters": _completions(prompt="8", max_tokens=14, ignore_eos=True),
    "completion-cut-letter": _completions(prompt="8", max_tokens=2, ignore_eos=True),
    "completion-n": _completions(n=3, seed=1, temperature=1.0, ignore_eos=True),
    "completion-seeded": _completions(seed=7, temperature=2.0, top_p=0.9, logprobs=1),
    "completion-penalties": _completions(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=80
    ),
    "completion-biased": _completions(
        logit_bias={str(5 + ord("x")): 30}, bad_words=["e"], min_tokens=3
    ),
    "completion-allowed": _completions(allowed_token_ids=[5 + ord("p"), 5 + ord("q")]),
    "completion-truncated": _completions(prompt="abcdefgh", truncate_prompt_tokens=3, echo=True),
    "completion-special": _completions(skip_special_tokens=False, add_special_tokens=False),
    "completion-of-a-regex": _completions(structured_outputs={"regex": "[ab]{3}c"}),
    "completion-of-a-choice": _completions(structured_outputs={"choice": ["alpha", "beta"]}),
    "completion-of-a-format": _completions(response_format=FORMAT, max_tokens=200),
    "chat": _chat(),
    "chat-logprobs": _chat(logprobs=True, top_logprobs=2),
    "chat-logprobs-wide": _chat(messages=say("8"), logprobs=True, top_logprobs=3, max_tokens=8),
    "chat-logprobs-alone": _chat(logprobs=True),
    "chat-tokens": _chat(return_token_ids=True),
    "chat-stop": _chat(messages=say("7"), stop=["é"]),
    "chat-n": _chat(n=2, seed=3, temperature=1.5, ignore_eos=True),
    "chat-echo": _chat(
        messages=[*say("abc"), {"role": "assistant", "content": "d"}],
        echo=True,
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "chat-parts": _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "ab"}]}]),
    "chat-system": _chat(messages=[{"role": "system", "content": "Be brief"}, *say("q")]),
    "chat-limit": _chat(max_tokens=None, max_completion_tokens=7),
    "chat-format": _chat(response_format=FORMAT, max_tokens=200),
    "chat-format-logprobs": _chat(
        response_format=FORMAT, max_tokens=200, logprobs=True, top_logprobs=1
    ),
    "chat-tool-required": _chat(tools=[TOOL], tool_choice="required", max_tokens=200),
    "chat-tools-required": _chat(tools=[OTHER_TOOL, TOOL], tool_choice="required", max_tokens=300),
    "chat-tool-named": _chat(tools=[TOOL, OTHER_TOOL], tool_choice=NAMED, max_tokens=200),
    "chat-tool-named-cut": _chat(tools=[TOOL], tool_choice=NAMED, max_tokens=9),
    "chat-tool-auto": _chat(tools=[LONG_TOOL], tool_choice="auto"),
    "chat-tool-auto-called": _chat(
        tools=[TOOL], tool_choice="auto", structured_outputs={"choice": [CALL]}, max_tokens=200
    ),
    "chat-tool-none": _chat(tools=[TOOL], tool_choice="none"),
    "chat-turns": _chat(messages=TURNS, tools=[OTHER_TOOL], tool_choice="none"),
    "response": _responses(),
    "response-instructions": _responses(input=say("xyz"), instructions="Be brief"),
    "response-settings": _responses(metadata={"a": "b"}, top_p=0.5, user="me"),
    "response-format": _responses(
        text={"format": {"type": "json_schema", "name": "place", "schema": PLACE}},
        max_output_tokens=200,
    ),
    "response-logprobs": _responses(include=["message.output_text.logprobs"], top_logprobs=2),
    "response-tool-required": _responses(
        tools=[FLAT], tool_choice="required", max_output_tokens=200
    ),
    "response-tool-named": _responses(
        tools=[FLAT],
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=200,
    ),
    "response-server-tool": _responses(tools=[{"type": "web_search"}]),
    "response-tier": _responses(service_tier="scale"),
    "message": _messages(),
    "message-tier": _messages(service_tier="standard_only"),
    "message-system": _messages(system="Be brief"),
    "message-stop": _messages(stop_sequences=["ij"]),
    "message-tool-any": _messages(tools=[SCHEMED], tool_choice={"type": "any"}, max_tokens=200),
    "message-tool-named": _messages(
        tools=[SCHEMED], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=200
    ),
}
#: Answered from the tokenizer alone.
RENDERED: Final[Mapping[str, Case]] = {
    "tokenize": ("/tokenize", {"prompt": "abc é", "return_token_strs": True}),
    "tokenize-plain": ("/tokenize", {"prompt": "<s>abc", "add_special_tokens": False}),
    "tokenize-chat": ("/tokenize", {"messages": say("abc")}),
    "tokenize-tools": ("/tokenize", {"messages": TURNS, "tools": [OTHER_TOOL]}),
    "detokenize": ("/detokenize", {"tokens": [102, 103, 104]}),
    "count": ("/v1/messages/count_tokens", {"messages": say("abc")}),
    "count-tools": (
        "/v1/messages/count_tokens",
        {"messages": say("abc"), "system": "Be brief", "tools": [SCHEMED]},
    ),
}
#: Refused with 400.
BAD: Final[Mapping[str, Case]] = {
    "no-tokens": _completions(max_tokens=-1),
    "too-many-tokens": _completions(max_tokens=5000),
    "temperature-of-words": _completions(temperature="hot"),
    "long-prompt": _completions(prompt="x" * 3000),
    "unknown-token": _completions(prompt=[70000]),
    "unknown-bias": _completions(logit_bias={"70000": 1}),
    "no-prompt": (COMPLETIONS, {"max_tokens": 1}),
    "no-choice": _completions(n=0),
    "many-logprobs": _completions(logprobs=1000),
    "bad-regex": _completions(structured_outputs={"regex": "("}),
    "messages-of-words": _chat(messages="abc"),
    "top-p": _chat(top_p=2),
    "tool-choice-of-words": _chat(tools=[TOOL], tool_choice="sometimes"),
    "unknown-tool": _chat(tools=[OTHER_TOOL], tool_choice=NAMED),
    "tool-choice-without-tools": _chat(tool_choice="required"),
    "top-logprobs-alone": _chat(top_logprobs=3),
    "no-messages": (CHAT, {}),
    "options-without-stream": _chat(stream=False, stream_options={"include_usage": True}),
    "bad-schema": _chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "nothing"}},
        }
    ),
    "response-temperature": _responses(temperature=-1),
    "message-without-limit": (MESSAGES, {"messages": say("abc")}),
    "long-message": _messages(max_tokens=5000),
    "message-temperature": _messages(temperature=-1),
    "no-tokens-to-show": ("/detokenize", {}),
    "nothing-to-count": ("/tokenize", {}),
}
#: Refused with 400; asked for a stream of these, vLLM's server fails behind its head.
BROKEN: Final[Mapping[str, Case]] = {
    "response-regex": _responses(structured_outputs={"regex": "("}),
    "message-schema": _messages(
        tools=[SCHEMED | {"input_schema": {"type": "nothing"}}], tool_choice={"type": "any"}
    ),
}
