"""Embeddings, classes and scores over HTTP, as vLLM's own server answers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from benchmarks.pooling_models import Kind
from tests.gateway.stand import OwnServer, Stand
from tests.support.waiting import eventually
from tokenyard import Client, arrays

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TEXTS: Final = ["a text", "another one, which is longer", "x1"]
LONG: Final = "many words " * 400
NEAR: Final[dict[str, Any]] = {"rtol": 0, "atol": 1e-6}
#: Longest prompt of these models.
MAX_LEN: Final = 64

Case = tuple[str, dict[str, Any]]
EMBED: Final[list[Case]] = [
    ("/v1/embeddings", {"input": "a text"}),
    ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": [2, 5, 3]}),
    ("/v1/embeddings", {"input": [[2, 5, 3], [2, 6, 3]]}),
    ("/v1/embeddings", {"input": TEXTS, "user": "me", "priority": 1}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/embeddings", {"input": LONG}),
    ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 5}),
    ("/v1/embeddings", {"input": "a", "dimensions": 8}),
    ("/v1/embeddings", {"input": []}),
    ("/v1/embeddings", {"input": ""}),
    ("/v1/embeddings", {"input": [[]]}),
    ("/v1/embeddings", {"input": [10**6]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "octal"}),
    ("/v1/embeddings", {}),
    ("/v2/embed", {"texts": TEXTS, "input_type": "search_query", "embedding_types": ["float"]}),
    ("/pooling", {"input": TEXTS}),
    ("/pooling", {"input": TEXTS, "task": "embed", "encoding_format": "base64"}),
    ("/pooling", {"input": "a", "task": "token_embed"}),
    ("/score", {"text_1": "a text", "text_2": TEXTS}),
    ("/v1/score", {"queries": TEXTS, "documents": TEXTS}),
    ("/rerank", {"query": "a text", "documents": TEXTS, "top_n": 2}),
]
RANK: Final[list[Case]] = [
    ("/classify", {"input": TEXTS}),
    ("/classify", {"input": "a text", "use_activation": False}),
    ("/pooling", {"input": "a text"}),
    ("/score", {"text_1": "a text", "text_2": TEXTS}),
    ("/v1/score", {"text_1": TEXTS, "text_2": TEXTS}),
    ("/score", {"text_1": TEXTS[:2], "text_2": TEXTS}),
    ("/score", {"text_1": "a", "text_2": LONG}),
    ("/score", {"text_1": "a", "text_2": LONG, "truncate_prompt_tokens": 20}),
    ("/rerank", {"query": "a text", "documents": TEXTS}),
    ("/v1/rerank", {"query": "a text", "documents": TEXTS, "top_n": 1}),
    ("/v2/rerank", {"query": "a", "documents": [*TEXTS, LONG], "max_tokens_per_doc": 4}),
    ("/rerank", {"query": "a text", "documents": []}),
]


def test_embeddings_are_those_of_the_queue(sdk: OpenAI, stand: Stand) -> None:
    texts = [f"text {number}" for number in range(300)]  # two requests on the queue
    found = sdk.embeddings.create(model="bert", input=texts)
    floats = sdk.embeddings.create(model="bert", input=texts[:3], encoding_format="float")

    with Client(stand.plant.url, stand.plant.keys.yard, result_timeout_s=60.0) as client:
        queued = client.submit(texts, model="bert", task="embed").result()
    assert [one.index for one in found.data] == list(range(300))
    for one, expected in zip(found.data, arrays(queued), strict=True):
        np.testing.assert_allclose(one.embedding, expected, **NEAR)
    np.testing.assert_allclose(floats.data[2].embedding, found.data[2].embedding, **NEAR)
    assert queued.usage is not None
    assert found.usage.total_tokens == queued.usage.prompt_tokens
    assert found.model == "bert"


def test_an_idempotency_key_has_one_answer(http: httpx.Client, stand: Stand) -> None:
    ask = {"model": "bert", "input": TEXTS}
    headers = {"Idempotency-Key": "pooling-1"}

    first, second = (http.post("/v1/embeddings", json=ask, headers=headers) for _ in range(2))
    other = http.post("/v1/embeddings", json={**ask, "input": "x"}, headers=headers)

    assert first.status_code == 200, first.text
    assert second.content == first.content
    assert other.status_code == 422


def test_documents_are_ranked(http: httpx.Client) -> None:
    ask = {"model": "cross", "query": "a text", "documents": TEXTS}
    ranked = http.post("/v1/rerank", json=ask).json()["results"]
    scores = http.post("/score", json={"model": "cross", "text_1": "a text", "text_2": TEXTS})

    by_place = {one["index"]: one["relevance_score"] for one in ranked}
    assert list(by_place.values()) == sorted(by_place.values(), reverse=True)
    for one in scores.json()["data"]:
        np.testing.assert_allclose(by_place[one["index"]], one["score"], **NEAR)
    assert len(scores.json()["data"]) == len(by_place) == len(TEXTS)


@pytest.mark.parametrize(
    ("path", "model", "body", "why"),
    [
        ("/v1/embeddings", "adder", {"input": "a"}, "'adder' does generate; /v1/embeddings needs"),
        ("/v1/embeddings", "cross", {"input": "a"}, "'cross' does classify; /v1/embeddings needs"),
        ("/classify", "bert", {"input": "a"}, "'bert' does embed; /classify needs classify"),
        ("/v1/completions", "bert", {"prompt": "a"}, "'bert' does embed; /v1/completions needs"),
        ("/v1/responses", "cross", {"input": "a"}, "'cross' does classify; /v1/responses needs"),
        ("/v1/embeddings", "bert", {"input": ["a", LONG]}, "maximum context length is 64"),
    ],
)
def test_what_a_model_cannot_do_is_refused_at_once(
    http: httpx.Client, path: str, model: str, body: dict[str, Any], why: str
) -> None:
    refused = http.post(path, json={"model": model, **body})
    assert refused.status_code == 400, refused.text
    assert why in refused.json()["error"]["message"]


def test_a_client_that_leaves_cancels_its_inputs(sdk: OpenAI, stand: Stand) -> None:
    connection, keys = stand.plant.connection, stand.plant.keys
    sdk.embeddings.create(model="bert", input="a")  # its model is loaded
    before = {*connection.scan_iter(f"{keys.prefix}request:*")}
    with stand.stopped_worker():
        with pytest.raises(openai.APITimeoutError):
            sdk.embeddings.create(model="bert", input=["a", "b"], timeout=1.0)
        [ledger] = {*connection.scan_iter(f"{keys.prefix}request:*")} - before
        eventually(lambda: connection.hget(ledger, "state") == b"cancelled")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "cases"), [("bert", EMBED), ("cross", RANK)])
def test_answers_are_those_of_vllms_own_server(
    kind: Kind, cases: list[Case], stand: Stand, http: httpx.Client, tmp_path: Path
) -> None:
    own = OwnServer(stand.pooling[kind], tmp_path, {}, MAX_LEN)
    try:
        with httpx.Client(base_url=own.url, timeout=60.0) as theirs:
            differ = [
                (path, body, found)
                for path, body in cases
                if (found := difference(http, theirs, path, {"model": kind, **body}))
            ]
    finally:
        own.stop()
    assert differ == []


def difference(ours: httpx.Client, theirs: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """How two answers differ; "" where they do not, but for ids, times and rounding."""
    a, b = (client.post(path, json=body) for client in (ours, theirs))
    if a.status_code != b.status_code:
        return f"{a.status_code} {a.text[:300]} | {b.status_code} {b.text[:300]}"
    return _unlike(a.json(), b.json(), "$")


_OWN: Final = frozenset({"id", "created", "system_fingerprint"})


def _unlike(a: Any, b: Any, at: str) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{at}: {sorted(a)} | {sorted(b)}"
        parts = [(a[name], b[name], f"{at}.{name}") for name in a if name not in _OWN]
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{at}: {len(a)} | {len(b)}"
        parts = [(*pair, f"{at}[{number}]") for number, pair in enumerate(zip(a, b, strict=True))]
    else:
        if isinstance(a, str) and at.endswith("]") is False and at.endswith(("embedding", "data")):
            a, b = (np.frombuffer(base64.b64decode(one), "<f4") for one in (a, b))
        is_near = np.allclose(a, b, **NEAR) if isinstance(a, float | np.ndarray) else a == b
        return "" if is_near else f"{at}: {json.dumps(a, default=str)[:200]} | {str(b)[:200]}"
    return next((found for part in parts if (found := _unlike(*part))), "")
