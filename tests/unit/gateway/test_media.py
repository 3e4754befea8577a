"""No program fetches or decodes what a request names: models here take text only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.http.errors import GatewayError
from gateway.profile import ModelProfile
from tests.engines.harness import MODELS
from tests.unit.gateway.conftest import adder_tokenizer, vllm_params
from tests.unit.gateway.test_door import CHAT, Queue, answer, front_end

pytestmark = pytest.mark.vllm

URL = "http://127.0.0.1:1/secret"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
TEXT = {"type": "text", "text": "1+1="}
SOURCE = {"type": "image", "source": {"type": "url", "url": URL}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [SOURCE]}
CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {}}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "image": (CHAT, said(TEXT, IMAGE)),
    "data": (CHAT, said({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})),
    "file": (CHAT, said({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})),
    "named": (CHAT, said({"type": "image_url", "image_url": {"url": URL}, "uuid": "u"})),
    "untyped": (CHAT, said({"image_url": URL, "uuid": "u"})),
    "audio": (CHAT, said({"type": "audio_url", "audio_url": {"url": URL}})),
    "video": (CHAT, said(TEXT, {"type": "video_url", "video_url": {"url": URL}})),
    "system": (
        CHAT,
        {"messages": [{"role": "system", "content": [IMAGE]}, *said(TEXT)["messages"]]},
    ),
    "tokenize": ("/tokenize", said(IMAGE)),
    "anthropic": ("/v1/messages", said(SOURCE) | {"max_tokens": 5}),
    "count": ("/v1/messages/count_tokens", said(SOURCE)),
    "result": (
        "/v1/messages",
        {"messages": [{"role": "assistant", "content": [CALL]}, *said(RESULT)["messages"]]}
        | {"max_tokens": 5},
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    ),
}


async def answers(
    model: Path, bodies: Mapping[str, tuple[str, dict[str, Any]]]
) -> tuple[dict[str, tuple[int, str]], int]:
    """Status and text of each answer of a front end, and how often the queue was asked."""
    queue = Queue()
    app = await front_end(queue, ModelProfile("adder", str(model)))
    found = {
        name: await answer(app, path, {"model": "adder"} | body)
        for name, (path, body) in bodies.items()
    }
    return found, len(queue.asked)


def check_refused(found: Mapping[str, tuple[int, str]]) -> None:
    for name, (status, text) in found.items():
        assert status == 400, (name, text)
        assert "models here take text only" in text, name


async def test_media_are_refused() -> None:
    found, asked = await answers(MODELS / "adder", BODIES)
    check_refused(found)
    assert not asked


def test_no_worker_connects_to_a_host_that_a_request_names() -> None:
    from gateway.frontend.params import wire_params

    params = vllm_params(extra_args={"kv_transfer_params": {"remote_host": "10.0.0.1"}})
    with pytest.raises(GatewayError, match="kv_transfer_params") as refused:
        wire_params(params, detokenize=True)
    assert refused.value.status == 400


def vision_model(folder: Path) -> None:
    """The files of a model of vision, as far as a front end reads them."""
    import transformers

    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / "adder")
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.image_token, tokenizer.fake_image_token = marks[:2]
    tokenizer.global_image_token, tokenizer.end_of_utterance_token = marks[2:]
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Idefics3Config(
        vision_config={"hidden_size": 128, "image_size": 64, "patch_size": 16, **sizes},
        text_config={"vocab_size": 32, "hidden_size": 128, "max_position_embeddings": 256, **sizes},
        image_token_id=tokenizer.image_token_id,
        scale_factor=2,
        architectures=["Idefics3ForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    image_processor = transformers.Idefics3ImageProcessor(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
    )
    transformers.Idefics3Processor(
        image_processor, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    ).save_pretrained(folder)


@pytest.mark.long
async def test_a_model_of_vision_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adder_tokenizer()  # sets vLLM's environment first
    from vllm.multimodal.media import MediaConnector

    fetched: list[str] = []

    def fetch(_: object, url: str, *__: object, **___: object) -> None:
        fetched.append(url)
        raise ValueError("fetched")

    monkeypatch.setattr(MediaConnector, "load_from_url", fetch)
    monkeypatch.setattr(MediaConnector, "load_from_url_async", fetch)
    vision_model(tmp_path)
    found, asked = await answers(tmp_path, BODIES)
    check_refused(found)
    assert (fetched, asked) == ([], 0)
    found, asked = await answers(tmp_path, {"text": (CHAT, said(TEXT) | {"max_tokens": 5})})
    assert asked, found
