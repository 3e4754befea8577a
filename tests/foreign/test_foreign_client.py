"""A client in another language, written from docs/protocol.md, against the real thing."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gateway.stand import Stand
from tests.support.absence import lacks

pytestmark = [pytest.mark.node, pytest.mark.vllm, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
PARTS = '[{"role":"user","content":[{"type":"text","text":"12+34="}]}]'
IMAGE = '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]'
GREEDY = '{"max_tokens":8,"temperature":0}'
OWN = {"model": "adder", "params": GREEDY}


@pytest.fixture(scope="module")
def node() -> str:
    """Node.js with the package `redis`; its absence is loud, and a failure in CI."""
    found = shutil.which("node")
    if not found or not (HERE / "node_modules" / "redis").is_dir():
        lacks("Node.js or its package `redis` is missing (make install): no foreign client was run")
    return found


def test_node_gets_answers_by_xadd_and_xread_alone(node: str, stand: Stand) -> None:
    requests = [
        {"id": "text", "prompt": "12+34=", **OWN},
        {"id": "chat", "messages": '[{"role":"user","content":"12+34="}]', **OWN},
        {"id": "parts", "messages": PARTS, **OWN},
        {"id": "image", "messages": IMAGE, **OWN},
        {"id": "stream", "prompt": "67+89=", **OWN, "stream": "1"},
        {"id": "wrong", "prompt": "1+1=", **OWN, "params": '{"temperature":-1}'},
        {"id": "model", "prompt": "1+1=", "model": "divider"},
        {"id": "text", "prompt": "12+34=", **OWN},  # again: known, and not run twice
    ]
    [first] = _ask(node, stand, requests[:1])
    assert first["text"] == "46"

    answers = {answer["id"]: answer for answer in _ask(node, stand, requests)}

    assert answers["text"] == first
    assert answers["chat"]["text"] == "46"
    assert answers["parts"]["text"] == "46"
    assert "image_url.url: give the content" in answers["image"]["error"]["message"]
    assert answers["stream"]["text"] == "156"
    assert answers["stream"]["deltas"] >= 1  # a reader who is behind gets several tokens in one
    assert answers["wrong"]["status"] == "failed"
    assert answers["wrong"]["error"]["code"] == "INVALID_REQUEST"
    assert "temperature" in answers["wrong"]["error"]["message"]
    assert answers["model"]["error"]["code"] == "MODEL_UNAVAILABLE"


def test_node_sends_token_ids_packed_and_as_json(node: str, stand: Stand) -> None:
    ids = _prompt_ids("12+34=")
    requests = [
        {"id": "packed", "packed": ids, **OWN},
        {"id": "json", "tokens": json.dumps(ids), **OWN},
    ]

    packed, plain = _ask(node, stand, requests)

    assert packed["tokens"] == plain["tokens"]
    assert packed["tokens"][:2] == _prompt_ids("46")
    assert "text" not in packed


def _prompt_ids(text: str) -> list[int]:
    """Ids of characters, from the model's own tokenizer file."""
    model = HERE.parents[1] / "examples" / "arithmetic" / "models" / "adder"
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[character] for character in text]


def _ask(node: str, stand: Stand, requests: list[dict[str, object]]) -> list[dict[str, object]]:
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    ran = subprocess.run(
        [node, "client.mjs", stand.plant.url, stand.plant.keys.yard],
        cwd=HERE,
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]
