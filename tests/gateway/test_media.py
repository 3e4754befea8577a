"""Pictures over HTTP, as vLLM's own server answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Final, cast
from uuid import uuid4

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI, UnprocessableEntityError

from benchmarks.media_models import picture, shown
from tests.engines.test_media import TEXT, said
from tests.gateway.stand import OwnServer, Stand
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


class _Site(BaseHTTPRequestHandler):
    """Has a picture for whoever asks once."""

    pictures: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        content = self.pictures.pop(self.path, None)
        self.send_response(404 if content is None else 200)
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def site(stand: Stand) -> Iterator[str]:
    """The URL of a site at an address that the gateways may ask."""
    with ThreadingHTTPServer(("127.0.0.1", stand.site_port), _Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_picture_at_a_url_is_fetched_once(sdk: OpenAI, site: str) -> None:
    create: Any = sdk.chat.completions.create
    text = create(model="pictures", messages=ONE, **GREEDY).choices[0].message.content
    url = f"{site}/{uuid4()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    asked = {"model": "pictures", "messages": said(part, TEXT), **GREEDY}
    key = {"Idempotency-Key": f"{uuid4()}"}
    _Site.pictures[url.removeprefix(site)] = picture(1)

    for _ in range(2):  # the second time it is gone, and the answer is still there
        answer = create(**asked, extra_headers=key)
        assert answer.choices[0].message.content == text
    with pytest.raises(UnprocessableEntityError, match="HTTP 404"):
        create(**asked)
    with pytest.raises(UnprocessableEntityError, match="HTTP 404"):
        sdk.responses.create(
            model="pictures",
            input=cast(
                "Any", [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
            ),
        )
    with pytest.raises(BadRequestError, match="not fetched"):
        create(**{**asked, "messages": said({**part, "image_url": {"url": "http://localhost/"}})})


def test_a_picture_in_a_file_is_read(sdk: OpenAI, http: httpx.Client) -> None:
    create: Any = sdk.chat.completions.create
    text = create(model="pictures", messages=ONE, **GREEDY).choices[0].message.content
    file = sdk.files.create(file=("one.png", picture(1)), purpose="vision").id

    part: Any = {"type": "input_image", "file_id": file, "detail": "auto"}
    asked: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "what"}]}]
    responses: Any = sdk.responses.create
    answer = responses(model="pictures", input=asked, temperature=0, max_output_tokens=12)
    assert answer.output_text == text
    source = {"type": "file", "file_id": file}
    messages = said({"type": "image", "source": source}, TEXT)
    body = {"model": "pictures", "messages": messages, **GREEDY}
    claude = http.post("/v1/messages", json=body).json()
    assert "".join(one.get("text", "") for one in claude["content"]) == text
    part = {"type": "image_url", "image_url": {"url": file}}
    chat = create(model="pictures", messages=said(part, TEXT), **GREEDY)
    assert chat.choices[0].message.content == text

    sdk.files.delete(file)
    with pytest.raises(NotFoundError, match="No such File"):
        create(model="pictures", messages=said(part, TEXT), **GREEDY)


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
