"""A gateway answers like vLLM's own server with the same model, but for ids and times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from tests.gateway.asked import LONG_TOOL, NAMED, OTHER_TOOL, PLACE, TOOL, say
from tests.gateway.speaker import MAX_LEN
from tests.gateway.stand import Door, Stand, running_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CLOSE: Final = 1e-4
#: Drawn at random, from the clock, or made of the server's own settings.
OWN: Final = {
    *("id", "created", "system_fingerprint", "created_at", "completed_at", "item_id"),
    *("call_id", "request_id", "metrics"),
}
CASES: Final[list[tuple[str, dict[str, Any]]]] = [
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 20}),
    (COMPLETIONS, {"prompt": ["abc", "xyz"], "max_tokens": 20, "logprobs": 3}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 20, "stop": "ij", "echo": True}),
    (COMPLETIONS, {"prompt": [102, 103], "max_tokens": 80, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 5, "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "8", "max_tokens": 12, "ignore_eos": True}),
    (CHAT, {"messages": say("abc"), "max_tokens": 20}),
    (CHAT, {"messages": say("abc"), "max_tokens": 20, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": say("7"), "max_tokens": 8, "stop": ["é"], "n": 2, "temperature": 0.01}),
    (CHAT, {"messages": say("a"), "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}),
    (CHAT, {"messages": say("a"), "tools": [TOOL, OTHER_TOOL], "tool_choice": NAMED}),
    (CHAT, {"messages": say("a"), "tools": [LONG_TOOL], "tool_choice": "auto", "max_tokens": 9}),
    (
        CHAT,
        {
            "messages": say("a"),
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": PLACE},
            },
        },
    ),
    (RESPONSES, {"input": "abc", "max_output_tokens": 20}),
    (RESPONSES, {"input": say("xyz"), "instructions": "Be brief", "max_output_tokens": 20}),
    (MESSAGES, {"messages": say("abc"), "max_tokens": 20}),
    (MESSAGES, {"messages": say("abc"), "max_tokens": 9, "system": "Be brief"}),
]
RENDERED: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/tokenize", {"prompt": "abc é", "return_token_strs": True}),
    ("/tokenize", {"messages": say("abc")}),
    ("/detokenize", {"tokens": [102, 103, 104]}),
    ("/v1/messages/count_tokens", {"messages": say("abc")}),
]
BAD: Final[list[tuple[str, dict[str, Any]]]] = [
    (COMPLETIONS, {"prompt": "abc", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 5000}),
    (COMPLETIONS, {"prompt": "abc", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "x" * 3000}),
    (COMPLETIONS, {"prompt": [70000]}),
    (COMPLETIONS, {"prompt": "abc", "logit_bias": {"70000": 1}}),
    (CHAT, {"messages": "abc"}),
    (CHAT, {"messages": say("abc"), "top_p": 2}),
    (CHAT, {"messages": say("abc"), "tools": [TOOL], "tool_choice": "sometimes"}),
    (CHAT, {"messages": say("abc"), "top_logprobs": 3}),
    (CHAT, {}),
    (RESPONSES, {"input": "abc", "temperature": -1}),
    (MESSAGES, {"messages": say("abc")}),
    (MESSAGES, {"messages": say("abc"), "max_tokens": 5000}),
]


@pytest.fixture(scope="module")
def vllm(stand: Stand, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own server with the speaker; its URL."""
    options = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--max-model-len", str(MAX_LEN)]
    folder = tmp_path_factory.mktemp("vllm")
    with running_vllm(stand.speaker, "speaker", folder, *options) as url:
        yield url


def asked(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status, and the body or the events."""
    whole = {"model": "speaker", "temperature": 0, "max_tokens": None, **body}
    if path == RESPONSES or path not in {COMPLETIONS, CHAT}:
        whole.pop("max_tokens") if "max_tokens" not in body else None
    answer = httpx.post(f"{url}{path}", json=whole, timeout=90.0)
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        data = [line.removeprefix("data: ") for line in lines]
        return answer.status_code, [one if one == "[DONE]" else json.loads(one) for one in data]
    return answer.status_code, answer.json()


def differences(ours: Any, theirs: Any, at: str = "$") -> list[str]:
    """Where two bodies differ, but for what each server makes up."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = [f"{at}.{key}: one only" for key in (ours.keys() ^ theirs.keys()) - OWN]
        for key in (ours.keys() & theirs.keys()) - OWN:
            found += differences(ours[key], theirs[key], f"{at}.{key}")
        return found
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [one for i, (a, b) in pairs for one in differences(a, b, f"{at}[{i}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        return [] if math.isclose(ours, theirs, abs_tol=CLOSE) else [f"{at}: {ours} != {theirs}"]
    return [] if ours == theirs else [f"{at}: {str(ours)[:200]!r} != {str(theirs)[:200]!r}"]


def check(door: Door, vllm: str, path: str, body: dict[str, Any]) -> int:
    ours, theirs = asked(door.url, path, body), asked(vllm, path, body)

    assert ours[0] == theirs[0], (ours, theirs)
    assert differences(ours[1], theirs[1]) == []
    return ours[0]


def named(case: tuple[str, dict[str, Any]]) -> str:
    return case[0].rpartition("/")[2] + "-" + "-".join(case[1])


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_are_equal(
    door: Door, vllm: str, case: tuple[str, dict[str, Any]], stream: bool
) -> None:
    path, body = case

    assert check(door, vllm, path, body | {"stream": stream}) == 200


@pytest.mark.parametrize("case", RENDERED, ids=named)
def test_what_is_rendered_is_equal(door: Door, vllm: str, case: tuple[str, dict[str, Any]]) -> None:
    assert check(door, vllm, *case) == 200


@pytest.mark.parametrize("case", BAD, ids=named)
def test_errors_have_the_same_status_and_form(
    door: Door, vllm: str, case: tuple[str, dict[str, Any]]
) -> None:
    (status, ours), (expected, theirs) = asked(door.url, *case), asked(vllm, *case)

    assert status == expected == 400, (ours, theirs)
    assert ours.keys() == theirs.keys()
    assert ours["error"].keys() == theirs["error"].keys()
