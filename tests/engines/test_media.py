"""Pictures and sound: the answers are those of `vllm.LLM`, and go on where they were."""

from __future__ import annotations

import io
import math
import wave
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from PIL import Image

from benchmarks.media_models import picture, shown, write_picture_model, write_sound_model
from tests.engines.harness import refused_field, run, spec_of
from tests.support import llm
from tests.support.builders import make_assignment
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.media import name_of, take_media
from tokenyard.protocol.wire import Assignment, Request, SamplingParams, pack_tokens
from worker.engines import Backend, Engine

pytestmark = pytest.mark.vllm

TEXT: Final = {"type": "text", "text": "what"}
GREEDY: Final = SamplingParams(**llm.GREEDY)


def sound(seconds: float = 2.0, rate: int = 16_000) -> bytes:
    """A WAV file with a rising tone."""
    times = (at / rate for at in range(int(rate * seconds)))
    tones = (int(20_000 * math.sin(2 * math.pi * (200 + 80 * time) * time)) for time in times)
    with io.BytesIO() as file:
        with wave.open(file, "wb") as written:
            written.setnchannels(1)
            written.setsampwidth(2)
            written.setframerate(rate)
            written.writeframes(array("h", tones).tobytes())
        return file.getvalue()


def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


CHATS: Final = {
    "one": said(shown(picture(1)), TEXT),
    "other": said(shown(picture(2)), TEXT),
    "tall": said(TEXT, shown(picture(3, 30, 120))),
    "two": said(shown(picture(1)), TEXT, shown(picture(2))),
    "text": said(TEXT),
}


def asked(chat: list[dict[str, Any]], key: str = "1-0", **fields: Any) -> Assignment:
    messages, media = take_media(chat)
    request = Request(id=key, messages=messages, params=GREEDY, **fields)
    return make_assignment(request, entry=key, media=media)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_picture_model(tmp_path_factory.mktemp("pictures") / "model")


@pytest.fixture
def engine(backend: Backend, folder: Path) -> Iterator[Engine]:
    engine = backend.load(spec_of("pictures", folder, kv_cache_gib=1 / 16))
    yield engine
    engine.close()


def test_pictures(engine: Engine, folder: Path, tmp_path: Path) -> None:
    answers = llm.answers_of_llm(folder, tmp_path, chats=[*CHATS.values()])["chats"]
    expected = {name: answer[:2] for name, answer in zip(CHATS, answers, strict=True)}

    outcomes = run(engine, *(asked(chat, f"{at}-0") for at, chat in enumerate(CHATS.values(), 1)))
    found = {
        name: [outcome.finished.prompt_tokens, outcome.finished.choices[0].tokens]
        for name, outcome in zip(CHATS, outcomes, strict=True)
        if outcome.finished is not None
    }
    assert found == expected
    assert len({str(tokens) for _, tokens in expected.values()}) == len(CHATS)
    _goes_on_behind_published_tokens(engine, expected["two"][1])
    _what_is_no_picture_is_refused(engine)


def _goes_on_behind_published_tokens(engine: Engine, whole: list[int]) -> None:
    again = asked(CHATS["two"], stream=True)
    begun = make_assignment(
        again.request, entry="1-0", attempt=2, media=again.media, published=whole[:5]
    )
    (outcome,) = run(engine, begun)
    assert outcome.finished is not None, outcome.fault
    assert outcome.finished.choices[0].tokens == whole


def _what_is_no_picture_is_refused(engine: Engine) -> None:
    assert refused_field(engine, asked(said(shown(b"no picture")))) == "messages"
    huge = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(huge, "PNG")
    with pytest.raises(InvalidRequest, match="exceeds limit of"):
        engine.add(asked(said(shown(huge.getvalue()))))


#: How a decoder of Whisper's is told to write down what is said in English.
WRITE_DOWN: Final = "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"


def test_sound(backend: Backend, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_sound_model(tmp_path / "sound")
    tokens = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(WRITE_DOWN)

    def heard(content: bytes, *published: int) -> Assignment:
        name = name_of(content)
        request = Request(
            id="a", tokens=pack_tokens(tokens), media={"audio": [name]}, params=GREEDY, stream=True
        )
        return make_assignment(request, entry="1-0", media={name: content}, published=published)

    engine = backend.load(spec_of("sound", folder, kv_cache_gib=1 / 16))
    try:
        answers = []
        for content in (sound(), sound(3.5)):
            (outcome,) = run(engine, heard(content))
            assert outcome.finished is not None, outcome.fault
            answers.append(outcome.finished.choices[0].tokens)
            assert outcome.finished.prompt_tokens == len(tokens)
        assert answers[0] != answers[1]
        (outcome,) = run(engine, heard(sound(), *answers[0][:5]))
        assert outcome.finished is not None, outcome.fault
        assert outcome.finished.choices[0].tokens == answers[0]
        assert refused_field(engine, heard(b"no sound")) == "media"
    finally:
        engine.close()
