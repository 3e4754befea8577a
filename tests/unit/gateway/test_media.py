"""What a request names is not decoded, and fetched only where that is allowed."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.media_models import write_picture_model
from gateway.announcements import ModelProfile
from gateway.http.context import CURRENT
from gateway.http.errors import GatewayError
from tests.engines.harness import MODELS
from tests.unit.gateway.conftest import vllm_params
from tests.unit.gateway.test_door import CHAT, Queue, answer, front_end
from tests.unit.gateway.test_fetching import answered, serving
from tokenyard.protocol.media import name_of

URL = "http://127.0.0.1:1/secret"
BYTES = b"no picture at all"
DATA = f"data:image/png;base64,{base64.b64encode(BYTES).decode()}"
TEXT = {"type": "text", "text": "1+1="}


def test_a_piece_of_sound_is_a_file_with_its_very_numbers_alone() -> None:
    import numpy as np
    import soundfile

    from gateway.frontend.media import _sound_file

    piece = np.random.default_rng(1).uniform(-1, 1, 1600).astype(np.float32)
    content = _sound_file((piece, 16_000), cast("Any", None))
    numbers, rate = soundfile.read(io.BytesIO(content), dtype="float32")
    assert rate == 16_000
    assert np.array_equal(numbers, piece)
    # Nothing in it changes: a gateway that makes it again makes the same.
    assert len(content) == 24 + piece.nbytes


def test_a_gateway_without_the_libraries_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gateway.frontend import pooling

    hears = SimpleNamespace(
        runner_type="generate",
        architectures=["Whisper"],
        registry=SimpleNamespace(
            is_transcription_model=lambda *_: True, is_transcription_only_model=lambda *_: True
        ),
        get_pooling_task=lambda _: None,
    )
    path = "/v1/audio/transcriptions"
    model = cast("Any", hears)
    tasks = pooling.tasks_of(model)
    pooling.check_path(path, "whisper", model, tasks)
    monkeypatch.setattr(pooling, "can_hear", lambda: False)
    with pytest.raises(GatewayError, match="cannot read sound: pip install 'PATH") as refused:
        pooling.check_path(path, "whisper", model, tasks)
    assert refused.value.status == 501


def image(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 5}


def source(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def result(url: str) -> dict[str, Any]:
    """A tool's result with a picture, in Anthropic's form."""
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    told = {"type": "tool_result", "tool_use_id": "a", "content": [source(url)]}
    return {"messages": [{"role": "assistant", "content": [call]}, *said(told)["messages"]]}


#: Requests with pictures, sound or video that no request may bring.
TRICKS: dict[str, tuple[str, dict[str, Any]]] = {
    "loopback": (CHAT, said(TEXT, image(URL))),
    "private": (CHAT, said(image("http://10.0.0.1/x.png"))),
    "metadata": (CHAT, said(image("http://169.254.169.254/latest/meta-data/"))),
    "ipv6": (CHAT, said(image("http://[::1]:8000/x"))),
    "mapped": (CHAT, said(image("http://[::ffff:127.0.0.1]/x"))),
    "decimal": (CHAT, said(image("http://2130706433/x"))),
    "credentials": (CHAT, said(image("https://example.org@127.0.0.1/x"))),
    "public": (CHAT, said(image("https://example.org/x.png"))),
    "file": (CHAT, said(image("file:///etc/passwd"))),
    "upper": (CHAT, said(image("FILE:///etc/passwd"))),
    "path": (CHAT, said(image("/etc/passwd"))),
    "ftp": (CHAT, said(image("ftp://127.0.0.1/x"))),
    "name": (CHAT, said(image(name_of(b"another's")))),
    "empty": (CHAT, said(image(""))),
    "no base64": (CHAT, said(image("data:image/png;base64,?"))),
    "no encoding": (CHAT, said(image("data:image/png,abc"))),
    "uuid": (CHAT, said(image(DATA, uuid="u"))),
    "only uuid": (CHAT, said({"image_url": None, "type": "image_url", "uuid": "u"})),
    "embeds": (CHAT, said({"type": "image_embeds", "image_embeds": "AAAA"})),
    "prompt embeds": (CHAT, said({"type": "prompt_embeds", "data": "AAAA"})),
    "audio": (CHAT, said({"type": "audio_url", "audio_url": {"url": URL}})),
    "video": (CHAT, said(TEXT, {"type": "video_url", "video_url": {"url": URL}})),
    "kwargs": (CHAT, said(image(DATA)) | {"mm_processor_kwargs": {"size": 1}}),
    "io": (CHAT, said(image(DATA)) | {"media_io_kwargs": {"image": {"image_mode": "L"}}}),
    "system": (
        CHAT,
        {"messages": [{"role": "system", "content": [image(URL)]}, *said(TEXT)["messages"]]},
    ),
    "tokenize": ("/tokenize", said(image(URL))),
    "anthropic": ("/v1/messages", said(source(URL))),
    "count": ("/v1/messages/count_tokens", said(source(URL))),
    "result": ("/v1/messages", result(URL) | {"max_tokens": 5}),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    ),
}
#: Requests with a picture of their own.
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, said(image(DATA), TEXT)),
    "detail": (
        CHAT,
        said(TEXT, {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}),
    ),
    "anthropic": (
        "/v1/messages",
        said(
            {
                "type": "image",
                "source": {
                    "type": "base64",
                    "media_type": "image/png",
                    "data": base64.b64encode(BYTES).decode(),
                },
            }
        ),
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": DATA}]}]},
    ),
}


async def answers(
    model: Path, bodies: Mapping[str, tuple[str, dict[str, Any]]], domain: str = "example.com"
) -> tuple[dict[str, tuple[int, str]], Queue]:
    """Status and text of each answer of a front end, and the queue, which answers none."""
    queue = Queue()
    app = await front_end(queue, ModelProfile("adder", str(model)), domain)
    found = {
        name: await answer(app, path, {"model": "adder"} | body)
        for name, (path, body) in bodies.items()
    }
    return found, queue


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was fetched or decoded, which fails."""
    vllm_params()  # sets vLLM's environment first
    import httpcore
    from PIL import Image
    from vllm.connections import HTTPConnection

    found: list[Any] = []

    def fail(*words: Any, **_: Any) -> None:
        found.append(words)
        raise OSError("fetched")

    for name in ("get_bytes", "async_get_bytes", "get_response", "get_async_response"):
        monkeypatch.setattr(HTTPConnection, name, fail)
    monkeypatch.setattr(httpcore.AsyncConnectionPool, "stream", fail)
    monkeypatch.setattr(Image, "open", fail)
    return found


async def test_a_model_of_text_takes_no_media(fetched: list[Any]) -> None:
    found, queue = await answers(MODELS / "adder", TRICKS | PICTURES)
    for name, (status, text) in found.items():
        assert status == 400, (name, text)
    assert (fetched, queue.asked) == ([], [])


async def test_nothing_is_fetched_or_decoded(fetched: list[Any], tmp_path: Path) -> None:
    model = write_picture_model(tmp_path / "model")
    found, queue = await answers(model, TRICKS)
    for name, (status, text) in found.items():
        assert status == 400, (name, text)
    assert (fetched, queue.asked) == ([], [])

    found, queue = await answers(model, PICTURES)
    assert [request.media for request in queue.asked] == [{"image": [name_of(BYTES)]}] * len(
        PICTURES
    ), found
    assert queue.media == [{name_of(BYTES): BYTES}] * len(PICTURES)
    assert fetched == []


@pytest.mark.parametrize("large", [0, 1])
async def test_pictures_of_a_listed_domain_go_to_the_queue(tmp_path: Path, large: int) -> None:
    model = write_picture_model(tmp_path / "model")
    async with serving() as site:
        site.answers = [answered("200 OK", b"first"), answered("200 OK", b"second")]
        asked = said(image(site.url()), TEXT, image(DATA), image(site.url()))
        asked["user"] = "u" * 20_000 * large  # a large body is rendered in another loop
        found, queue = await answers(model, {"two": (CHAT, asked)}, site.domain)
    (media,) = queue.media
    assert media is not None
    assert sorted(media.values()) == [b"first", BYTES, b"second"], found
    names = queue.asked[0].media["image"]
    assert {media[names[0]], media[names[2]]} == {b"first", b"second"}
    assert media[names[1]] == BYTES


@pytest.mark.parametrize(
    ("is_known", "is_gone"), [(False, True), (True, True), (True, False)], ids=str
)
async def test_a_picture_that_is_gone_ends_its_request_unless_the_queue_has_it(
    tmp_path: Path, *, is_known: bool, is_gone: bool
) -> None:
    model = write_picture_model(tmp_path / "model")
    queue = Queue()
    queue.is_known = is_known
    async with serving() as site:
        app = await front_end(queue, ModelProfile("adder", str(model)), site.domain)
        # Where it is not gone, the URL shows another one by now.
        site.answers = [answered("404 Not Found") if is_gone else answered("200 OK", b"another")]
        await answer(app, CHAT, {"model": "adder"} | said(image(site.url())))
    context = CURRENT.get()
    assert context is not None
    assert context.ticket.error is not None
    if is_known:
        assert queue.media == [None]  # its replies alone are read
    else:
        assert (context.ticket.error.status, queue.asked) == (422, [])
