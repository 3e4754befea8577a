"""A gateway answers like vLLM's own server with the same model, byte for byte but ids and times.

`alike.OWN` names each id and time. What else differs stands in docs/gateway.md.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.alike import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Asked, Event, merges
from tests.gateway.asked import say
from tests.gateway.cases import BAD, BROKEN, GENERATED, RENDERED, Case
from tests.gateway.stand import Door

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

USAGE: Final = {"include_usage": True}
#: Bodies with a text by endpoint.
CACHED: Final[Mapping[str, Callable[[str], dict[str, Any]]]] = {
    COMPLETIONS: lambda text: {"prompt": text, "max_tokens": 5},
    CHAT: lambda text: {"messages": say(text), "max_tokens": 5},
    RESPONSES: lambda text: {"input": text, "max_output_tokens": 5},
    MESSAGES: lambda text: {"messages": say(text), "max_tokens": 5},
}
WAYS: Final[Mapping[str, dict[str, Any]]] = {
    "whole": {},
    "stream": {"stream": True},
    "usage": {"stream": True, "stream_options": USAGE},
    "usages": {"stream": True, "stream_options": USAGE | {"continuous_usage_stats": True}},
}
#: Times that both are asked again where vLLM has merged outputs, as it does on a busy machine.
MOST_MERGED: Final = 4
ASKED: Final = [
    (name, way)
    for name, (path, _) in GENERATED.items()
    for way in WAYS
    if "stream_options" not in WAYS[way] or path in {COMPLETIONS, CHAT}
]


def both(door: Door, vllm: str, case: Case, **more: Any) -> tuple[Asked, Asked]:
    """The answers of the gateway and of vLLM's server."""
    path, body = case
    whole = {"model": "speaker", "temperature": 0, **more, **body}
    return Asked.of(door.url, path, whole), Asked.of(vllm, path, whole)


def message_of(refused: Asked) -> str:
    said: str = json.loads(refused.body)["error"]["message"]
    return said


def refuse_alike(path: str, ours: Asked, theirs: Asked) -> None:
    """Check that both refuse for one reason; of messages only ours has Anthropic's form."""
    assert ours.status == theirs.status == 400
    if path != MESSAGES:
        assert ours == theirs
        return
    told = json.loads(ours.body)
    assert re.fullmatch("[0-9a-f]{32}", told.pop("request_id"))
    error = {"type": "invalid_request_error", "message": message_of(theirs)}
    assert told == {"type": "error", "error": error}


@pytest.mark.parametrize(("name", "way"), ASKED)
def test_answers_are_equal(door: Door, vllm: str, name: str, way: str) -> None:
    ours, theirs = both(door, vllm, GENERATED[name], **WAYS[way])
    for _ in range(MOST_MERGED):
        if len(ours.events) == len(theirs.events):
            break
        # vLLM has merged outputs of several steps, of which some of its parsers make other events.
        ours, theirs = both(door, vllm, GENERATED[name], **WAYS[way])

    assert ours.status == theirs.status == 200, (ours, theirs)
    assert ours.kind == theirs.kind
    assert ours.body == theirs.body
    assert merges(ours.events, theirs.events) >= 0
    # Only ours can be continued.
    assert len(ours.event_ids) == len(ours.events)
    assert bool(ours.events) == ("stream" in WAYS[way])
    assert not theirs.event_ids


@pytest.mark.parametrize("name", GENERATED)
def test_no_interval_changes_a_stream(door: Door, name: str) -> None:
    path, body = GENERATED[name]
    stream = {"model": "speaker", "temperature": 0, **body, "stream": True}

    each, *others = (
        Asked.of(door.url, path, stream, {"X-Tokenyard-Stream-Interval-Ms": ms})
        for ms in ("0", "30", "100")
    )

    assert each.status == 200
    assert len(each.events) > 1
    expected = sorted(each.events, key=_choice)
    assert all(sorted(one.events, key=_choice) == expected for one in others)


def _choice(event: Event) -> int:
    """The choice that an event of OpenAI's belongs to; those of one come in order."""
    found = json.loads(event.data) if event.data.startswith("{") else {}
    return sum(one["index"] for one in found.get("choices") or ())


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", CACHED)
def test_what_was_cached_is_told_alike(door: Door, vllm: str, path: str, is_stream: bool) -> None:
    text = f"{path} {is_stream} {60 * 'abc'}"  # its first block, of 128, is its own
    more = WAYS["usage"] if is_stream and path in {COMPLETIONS, CHAT} else {"stream": is_stream}
    for cached in (0, 128):
        ours, theirs = both(door, vllm, (path, CACHED[path](text)), **more)

        shown = ours.body + "".join(event.data for event in ours.events)
        assert re.search(rf'"(cached_tokens|cache_read_input_tokens)": ?{cached}\b', shown)
        assert ours.body == theirs.body
        assert merges(ours.events, theirs.events) >= 0


def test_a_client_that_closes_its_half_has_left(door: Door, vllm: str) -> None:
    body = json.dumps({"model": "speaker", "prompt": "abc", "max_tokens": 20}).encode()
    for url in (door.url, vllm):
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 60.0) as client:
            client.sendall(head.encode() + body)
            client.shutdown(socket.SHUT_WR)

            assert client.recv(1) == b""


@pytest.mark.parametrize("name", RENDERED)
def test_what_is_rendered_is_equal(door: Door, vllm: str, name: str) -> None:
    ours, theirs = both(door, vllm, RENDERED[name])

    assert ours == theirs
    assert ours.status == 200


@pytest.mark.parametrize("name", BAD)
def test_refusals_are_equal(door: Door, vllm: str, name: str) -> None:
    ours, theirs = both(door, vllm, BAD[name])

    refuse_alike(BAD[name][0], ours, theirs)


@pytest.mark.parametrize("name", BAD)
def test_refusals_of_streams_come_before_the_head(door: Door, vllm: str, name: str) -> None:
    ours, theirs = both(door, vllm, BAD[name], stream=True)

    assert (ours.status, ours.kind) == (400, "application/json")
    # vLLM finds some faults only behind its head: then they are in an event.
    told = theirs.body if theirs.status == 400 else theirs.events[0].data
    if BAD[name][0] == MESSAGES:
        assert message_of(ours) == json.loads(told)["error"]["message"]
    else:
        assert json.loads(ours.body) == json.loads(told)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_a_stream_of_vllms_is_refused(
    door: Door, vllm: str, name: str, stream: bool
) -> None:
    path, body = BROKEN[name]
    asked = {"model": "speaker", **body}
    ours = Asked.of(door.url, path, asked | {"stream": stream})
    theirs = Asked.of(vllm, path, asked)

    assert ours.status == theirs.status == 400
    assert message_of(ours) == message_of(theirs)


def test_a_model_is_described_alike(door: Door, vllm: str) -> None:
    listed = [httpx.get(f"{url}/v1/models", timeout=60.0).json() for url in (door.url, vllm)]
    ours, theirs = ({one["id"]: one for one in found["data"]}["speaker"] for found in listed)

    versions = [httpx.get(f"{url}/version").json() for url in (door.url, vllm)]
    assert versions[0].items() >= versions[1].items()
    assert listed[0]["object"] == listed[1]["object"]
    assert {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} == {
        *("created", "owned_by", "permission", "state"),
    }
