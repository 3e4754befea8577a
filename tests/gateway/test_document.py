"""The OpenAPI document lists what the gateway serves, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest

from tests.gateway.asked import say
from tests.support.processes import ROOT

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

METHODS = ("get", "post", "put", "patch", "delete")
#: Endpoints of vLLM's own server.
FOREIGN = (
    *("/docs", "/redoc", "/server_info", "/load", "/ping", "/invocations"),
    *("/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/render"),
    *("/inference/v1/generate", "/tokenizer_info", "/pause", "/sleep", "/scale_elastic_ep"),
)
MADE_UP = {
    "model": "speaker",
    "file_id": f"file-{0:032x}",
    "batch_id": f"batch_{0:032x}",
    "response_id": f"resp_{0:032x}",
}


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").raise_for_status().json()
    return found


def test_it_lists_what_is_served(http: httpx.Client, document: dict[str, Any]) -> None:
    served = {
        path: {
            method
            for method in METHODS
            if (answer := http.request(method, path.format(**MADE_UP))).status_code != 405
            and "there is no" not in answer.text
        }
        for path in (*document["paths"], *FOREIGN)
    }

    described = {path: set(methods) for path, methods in document["paths"].items()}
    assert served == described | {path: set[str]() for path in FOREIGN}


def test_the_page_names_the_same_endpoints(document: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    named = re.findall(r"`(?:[A-Z]+ )?(/[a-z][\w/<>{}.]*)(?:\?[^`]*)?`", page)
    named = [re.sub(r"[<{]\w+[>}]", "{}", path) for path in named]

    assert {re.sub(r"\{\w+\}", "{}", path) for path in document["paths"]} <= set(named)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": say("a"), "max_tokens": 5, "logprobs": True}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5, "logprobs": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 5}),
        ("/v1/messages", {"messages": say("a"), "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": say("a")}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_bodies_and_answers_have_the_described_form(
    http: httpx.Client, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    described = document["paths"][path]["post"]
    form = described["requestBody"]["content"]["application/json"]["schema"]
    right = described["responses"]["200"]["content"]["application/json"]["schema"]
    wrong = described["responses"]["default"]["content"]["application/json"]["schema"]
    body = {"model": "speaker", **body}
    answer, refusal = http.post(path, json=body), http.post(path, json=body | {"model": 5})

    assert (answer.status_code, refusal.status_code) == (200, 400)
    for instance, of in ((body, form), (answer.json(), right), (refusal.json(), wrong)):
        whole = {**of, "components": document["components"]}
        jsonschema.Draft202012Validator(whole).validate(instance)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(whole).validate([])
