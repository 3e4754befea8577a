"""Pictures over HTTP, as vLLM's own server answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from openai import OpenAI

from benchmarks.media_models import picture, shown
from tests.engines.test_media import TEXT, said
from tests.gateway.stand import Door, OwnServer, Stand
from tests.gateway.test_pooling import Case, difference
from tokenyard import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

GREEDY: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 12}
ONE: Final = said(shown(picture(1)), TEXT)
TWO: Final = said(shown(picture(1)), TEXT, shown(picture(2, 30, 120)))
CHAT: Final = "/v1/chat/completions"
#: Longest prompt of the model.
MAX_LEN: Final = 512

CASES: Final[list[Case]] = [
    (CHAT, {"messages": ONE, **GREEDY}),
    (CHAT, {"messages": TWO, **GREEDY}),
    (CHAT, {"messages": [*ONE, {"role": "assistant", "content": "x"}, *TWO], **GREEDY}),
    (CHAT, {"messages": ONE, **GREEDY, "n": 2}),
    (CHAT, {"messages": ONE, **GREEDY, "logprobs": True, "top_logprobs": 1}),
    (CHAT, {"messages": ONE, **GREEDY, "prompt_logprobs": 0, "max_tokens": 1}),
    (CHAT, {"messages": said(TEXT), **GREEDY}),
]
REFUSED: Final[list[Case]] = [
    (CHAT, {"messages": said(*[shown(picture(1))] * 30), **GREEDY}),
    (CHAT, {"messages": said(shown(b"no picture"), TEXT), **GREEDY}),
    (CHAT, {"messages": said({"type": "image_url", "image_url": {"url": "data:x,y"}}), **GREEDY}),
    (CHAT, {"messages": said({"type": "image_embeds", "image_embeds": "AAAA"}), **GREEDY}),
    (CHAT, {"messages": said({"type": "audio_url", "audio_url": {"url": "data:,"}}), **GREEDY}),
]


@pytest.fixture
def sdk(door: Door) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{door.url}/v1", api_key="none", timeout=90.0, max_retries=0) as client:
        yield client


def test_a_picture_is_seen(sdk: OpenAI, stand: Stand) -> None:
    create: Any = sdk.chat.completions.create
    whole = create(model="pictures", messages=TWO, **GREEDY)
    other = create(model="pictures", messages=ONE, **GREEDY)
    usage = {"include_usage": True}
    pieces = list(
        create(model="pictures", messages=TWO, stream=True, stream_options=usage, **GREEDY)
    )
    with Client(stand.plant.url, stand.plant.keys.yard, result_timeout_s=60.0) as client:
        queued = client.submit(TWO, model="pictures", **GREEDY).result()

    assert whole.choices[0].message.content == queued.text
    assert other.choices[0].message.content != queued.text
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == queued.text
    assert queued.usage is not None
    assert queued.usage.prompt_tokens > 30
    for told in (whole.usage, pieces[-1].usage):
        assert told.prompt_tokens == queued.usage.prompt_tokens
        assert told.completion_tokens == queued.usage.completion_tokens
    keys = stand.plant.keys
    assert list(stand.plant.connection.scan_iter(f"{keys.prefix}media:*")) == []


def test_other_forms_of_a_picture(sdk: OpenAI, http: httpx.Client) -> None:
    create: Any = sdk.chat.completions.create
    text = create(model="pictures", messages=ONE, **GREEDY).choices[0].message.content
    url = ONE[0]["content"][0]["image_url"]["url"]

    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    asked = [{"role": "user", "content": [part, {"type": "input_text", "text": "what"}]}]
    responses: Any = sdk.responses.create
    answer = responses(model="pictures", input=asked, temperature=0, max_output_tokens=12)
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages = said({"type": "image", "source": source}, TEXT)
    body = {"model": "pictures", "messages": messages, **GREEDY}
    claude = http.post("/v1/messages", json=body).json()

    assert answer.output_text == text
    assert "".join(one.get("text", "") for one in claude["content"]) == text
    assert answer.usage.input_tokens == claude["usage"]["input_tokens"]


@pytest.mark.long
def test_answers_are_those_of_vllms_own_server(
    stand: Stand, http: httpx.Client, tmp_path: Path
) -> None:
    own = OwnServer(stand.pictures, tmp_path, {}, MAX_LEN)
    try:
        with httpx.Client(base_url=own.url, timeout=60.0) as theirs:
            differ = [
                (at, found)
                for at, (path, body) in enumerate(CASES)
                if (found := difference(http, theirs, path, {"model": "pictures", **body}))
            ]
            for path, body in REFUSED:
                asked = {"model": "pictures", **body}
                refusals = [client.post(path, json=asked) for client in (http, theirs)]
                codes = [one.status_code for one in refusals]
                assert codes[0] == 400 <= codes[1], [one.text for one in refusals]
    finally:
        own.stop()
    assert not differ, "\n".join(map(str, differ))
