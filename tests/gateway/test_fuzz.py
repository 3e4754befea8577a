"""Whatever body comes: never a 500, never a hang, never an accepted request without an end."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.asked import PLACE, TOOL
from tests.gateway.stand import Door, Stand
from tests.support.effort import examples
from tests.support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

#: No answer may take longer: the longest has 1,000 tokens.
LONGEST_S: Final = 60.0
EACH: Final = examples(75, 2500)

anything: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
text: Final = st.text(max_size=40)
count: Final = st.sampled_from([-1, 0, 1, 2, 5, 20, 2**31, 2**63])
number: Final = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 1e30, 1e-30])
schema: Final = st.sampled_from(
    [PLACE, {}, {"type": "nothing"}, {"type": "string", "maxLength": 4}, {"$ref": "#/none"}]
)
message: Final = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "me"])},
    optional={
        "content": text
        | st.none()
        | st.lists(
            st.fixed_dictionaries(
                {"type": st.sampled_from(["text", "image_url", "input_text"])},
                optional={"text": text, "image_url": anything},
            ),
            max_size=2,
        ),
        "tool_call_id": text,
        "tool_calls": st.lists(anything, max_size=1),
    },
)
tool: Final = (
    st.just(TOOL)
    | st.fixed_dictionaries(
        {
            "type": st.sampled_from(["function", "custom"]),
            "function": st.fixed_dictionaries(
                {"name": text}, optional={"parameters": schema, "strict": st.booleans()}
            ),
        }
    )
    | anything
)
COMMON: Final[dict[str, st.SearchStrategy[Any]]] = {
    "stream": st.booleans(),
    "max_tokens": count,
    "max_completion_tokens": count,
    "max_output_tokens": count,
    "temperature": number,
    "top_p": number,
    "top_k": count,
    "min_p": number,
    "n": st.sampled_from([-1, 0, 1, 2, 3, 10**6]),
    "seed": count,
    "stop": text | st.lists(text, max_size=3),
    "stop_token_ids": st.lists(count, max_size=3),
    "presence_penalty": number,
    "frequency_penalty": number,
    "repetition_penalty": number,
    "logprobs": st.booleans() | count,
    "top_logprobs": count,
    "prompt_logprobs": count,
    "echo": st.booleans(),
    "best_of": count,
    "use_beam_search": st.booleans(),
    "min_tokens": count,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "truncate_prompt_tokens": count,
    "logit_bias": st.dictionaries(st.sampled_from(["1", "260", "261", "x"]), number),
    "tools": st.lists(tool, max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", "x"]) | anything,
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "x"])},
        optional={"json_schema": st.fixed_dictionaries({"name": text, "schema": schema})},
    ),
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={
            "choice": st.lists(text, max_size=2),
            "regex": st.sampled_from(["[ab]{1,4}", "(", ""]),
            "json": schema,
            "grammar": text,
        },
    ),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | anything,
    "priority": count,
    "service_tier": st.sampled_from(["auto", "default", "flex", "priority", "x"]),
    "request_id": text,
    "cache_salt": text,
    "user": text,
    "system": text | anything,
    "background": st.booleans(),
    "store": st.booleans(),
    "previous_response_id": text,
    "bad_words": st.lists(text, max_size=2),
    "allowed_token_ids": st.lists(count, max_size=3),
    "vllm_xargs": anything,
    "kv_transfer_params": anything,
    "chat_template": st.sampled_from(["{{ 1 }}", "{{", "{% for %}"]),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "documents": anything,
    "return_token_ids": st.booleans(),
}
PROMPTS: Final[dict[str, dict[str, st.SearchStrategy[Any]]]] = {
    "/v1/completions": {
        "prompt": text
        | st.lists(text, max_size=3)
        | st.lists(st.integers(-1, 300), max_size=6)
        | anything
    },
    "/v1/chat/completions": {"messages": st.lists(message, max_size=3) | anything},
    "/v1/responses": {"input": text | st.lists(message, max_size=3) | anything},
    "/v1/messages": {"messages": st.lists(message, max_size=3) | anything},
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A body that is right in most fields, and wild in some."""
    body: dict[str, Any] = {"model": draw(st.sampled_from(["speaker"] * 9 + ["none"]))}
    for name, values in PROMPTS[path].items():
        body[name] = draw(values)
    for name in draw(st.lists(st.sampled_from(sorted(COMMON)), max_size=6, unique=True)):
        body[name] = draw(COMMON[name])
    body.setdefault("max_output_tokens" if path == "/v1/responses" else "max_tokens", 5)
    if draw(st.integers(0, 9)) == 0:
        body[draw(text)] = draw(anything)
    return body


def check(door: Door, path: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode(errors="replace")
    headers = {"Content-Type": "application/json"}

    answer = httpx.post(f"{door.url}{path}", content=raw, headers=headers, timeout=LONGEST_S)

    assert answer.status_code in {200, 400, 404, 413, 422, 501}, (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert "error" in answer.json(), answer.text
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"code": 500' not in answer.text, answer.text
        assert '"code":500' not in answer.text, answer.text


@pytest.mark.parametrize("path", PROMPTS)
def test_no_body_breaks_the_gateway(stand: Stand, door: Door, path: str) -> None:
    @settings(max_examples=EACH, suppress_health_check=list(HealthCheck), deadline=None)
    @given(bodies(path))
    def search(body: dict[str, Any]) -> None:
        check(door, path, body)

    search()

    # Whatever was accepted has ended.
    keys, connection = stand.plant.keys, stand.plant.connection
    eventually(
        lambda: (
            not sum(connection.xlen(keys.intake(name)) for name in ("high", "normal", "low"))
            and not list(connection.scan_iter(match="*tokens:http*", count=1000))
        ),
        timeout_s=120.0,
    )
    assert httpx.get(f"{door.url}/health", timeout=10.0).status_code == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"a":' * 5000, b"\xff", b"1e999"])
@pytest.mark.parametrize("path", PROMPTS)
def test_what_is_no_json_object_is_a_bad_request(door: Door, path: str, raw: bytes) -> None:
    answer = httpx.post(f"{door.url}{path}", content=raw, timeout=30.0)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
