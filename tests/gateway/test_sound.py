"""Transcriptions and translations over HTTP, as vLLM's own server answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from openai import OpenAI

from tests.engines.test_media import sound
from tests.gateway.stand import Door, OwnServer, Stand

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
TRANSLATIONS: Final = "/v1/audio/translations"
#: Longest prompt and answer of the model.
MAX_LEN: Final = 64


SHORT: Final = sound()
#: Of three pieces.
LONG: Final = sound(10.0, 22_050)
GREEDY: Final[dict[str, Any]] = {"model": "sound", "temperature": 0, "max_completion_tokens": 12}
CASES: Final[list[tuple[str, bytes, dict[str, Any]]]] = [
    (TRANSCRIPTIONS, SHORT, {"language": "en"}),
    (TRANSCRIPTIONS, SHORT, {}),
    (TRANSCRIPTIONS, LONG, {"language": "de", "prompt": "a word"}),
    (TRANSCRIPTIONS, LONG, {"language": "zh"}),
    (TRANSCRIPTIONS, LONG, {"language": "en", "response_format": "verbose_json"}),
    (TRANSCRIPTIONS, SHORT, {"language": "en", "response_format": "text"}),
    (TRANSCRIPTIONS, LONG, {"language": "en", "stream": "true", "stream_include_usage": "true"}),
    (TRANSCRIPTIONS, SHORT, {"language": "en", "seed": 7, "temperature": 1.0, "top_k": 4}),
    (TRANSLATIONS, LONG, {"language": "de"}),
    (TRANSLATIONS, SHORT, {"language": "de", "stream": "true"}),
]
REFUSED: Final[list[tuple[str, bytes, dict[str, Any]]]] = [
    (TRANSCRIPTIONS, b"no sound", {"language": "en"}),
    (TRANSCRIPTIONS, SHORT[:40], {"language": "en"}),
    (TRANSCRIPTIONS, sound(601.0, 1000), {"language": "en"}),
    (TRANSCRIPTIONS, SHORT, {"language": "xx"}),
    (TRANSCRIPTIONS, SHORT, {"response_format": "srt"}),
    (TRANSCRIPTIONS, SHORT, {"temperature": -1}),
    (TRANSCRIPTIONS, SHORT, {"response_format": "verbose_json", "stream": "true"}),
]


def ask(
    http: httpx.Client, path: str, content: bytes, fields: dict[str, Any], **headers: str
) -> httpx.Response:
    form = {**GREEDY, **fields}
    return http.post(path, data=form, files={"file": ("a.wav", content)}, headers=headers)


def answer(response: httpx.Response) -> Any:
    """Status and content, without what is drawn at random."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, response.json()
    lines = (line for line in response.text.splitlines() if line.startswith("data: {"))
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
    return response.status_code, [{**one, "id": "", "created": 0} for one in pieces]


@pytest.fixture
def sdk(door: Door) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{door.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        yield client


def test_sound_is_written_down(sdk: OpenAI, http: httpx.Client, stand: Stand) -> None:
    create: Any = sdk.audio.transcriptions.create
    asked = {"model": "sound", "temperature": 0, "extra_body": {"max_completion_tokens": 12}}
    one = create(file=("a.wav", SHORT), language="en", **asked)
    whole = create(file=("a.wav", LONG), language="en", **asked)
    pieces = list(create(file=("a.wav", LONG), language="en", stream=True, **asked))
    timed = create(file=("a.wav", LONG), language="en", response_format="verbose_json", **asked)
    english = ask(http, TRANSLATIONS, SHORT, {"language": "de"}).json()

    assert one.text
    assert whole.text.startswith(one.text[:1])
    assert whole.usage.seconds == 10
    deltas = [choice["delta"].get("content") or "" for one in pieces for choice in one.choices]
    assert "".join(deltas).split() == whole.text.split()
    assert timed.duration == pytest.approx(10.0)
    assert english["text"]
    keys = stand.plant.keys
    assert list(stand.plant.connection.scan_iter(f"{keys.prefix}media:*")) == []


def test_the_same_key_gives_the_same_answer(http: httpx.Client) -> None:
    key = {"Idempotency-Key": "a tone"}
    fields = {"temperature": 1.0}  # without a seed
    first, second = (ask(http, TRANSCRIPTIONS, LONG, fields, **key) for _ in range(2))
    other = ask(http, TRANSCRIPTIONS, SHORT, fields, **key)
    streams = [
        ask(http, TRANSCRIPTIONS, LONG, {**fields, "stream": "true"}, **{"Idempotency-Key": "b"})
        for _ in range(2)
    ]

    assert first.status_code == second.status_code == 200, first.text
    assert first.json() == second.json()
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert "transcription.chunk" in streams[0].text
    assert streams[0].text == streams[1].text
    assert other.json()["error"]["code"] == "idempotency_key_reused"


def test_refusals_say_what_is_missing(http: httpx.Client) -> None:
    file = {"file": ("a.wav", SHORT)}
    no_form = http.post(TRANSCRIPTIONS, json={"model": "sound"})
    no_file = http.post(TRANSCRIPTIONS, data=GREEDY, files={"other": ("", b"", "")})
    two = http.post(TRANSCRIPTIONS, data=GREEDY, files=[("file", SHORT), ("file", SHORT)])
    text = http.post(TRANSCRIPTIONS, data={**GREEDY, "model": "adder"}, files=file)
    chat = http.post("/v1/chat/completions", json={"model": "sound", "messages": []})
    beams = ask(http, TRANSCRIPTIONS, SHORT, {"use_beam_search": "true"})

    told = [one.json()["error"]["message"] for one in (no_form, no_file, two, text, chat)]
    assert [one.status_code for one in (no_form, no_file, two, text, chat)] == [400] * 5, told
    assert "give a form" in told[0]
    assert "file" in told[1]
    assert "Maximum number of files is 1" in told[2]
    assert "'adder' does generate; /v1/audio/transcriptions needs transcription" in told[3]
    assert "'sound' does transcription; /v1/chat/completions needs generate" in told[4]
    assert beams.status_code == 400


@pytest.mark.long
def test_answers_are_those_of_vllms_own_server(
    stand: Stand, http: httpx.Client, tmp_path: Path
) -> None:
    own = OwnServer(stand.sound, tmp_path, {}, MAX_LEN)
    try:
        with httpx.Client(base_url=own.url, timeout=120.0) as theirs:
            for path, content, fields in CASES:
                ours, wanted = (answer(ask(one, path, content, fields)) for one in (http, theirs))
                assert ours == wanted, (path, fields)
            for path, content, fields in REFUSED:
                refusals = [ask(one, path, content, fields) for one in (http, theirs)]
                codes = [one.status_code for one in refusals]
                assert codes[0] == 400 <= codes[1], [one.text for one in refusals]
    finally:
        own.stop()
