"""What the gateway tells about itself: its version, its endpoints, and its metrics."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import pytest

from tests.unit.gateway.conftest import lone_gateway
from tokenyard import __version__


async def get(
    path: str, keys: Literal["off", "required"] = "off", method: str = "GET", **headers: str
) -> httpx.Response:
    """The answer of a gateway without a board."""
    async with lone_gateway(keys=keys, board=False) as (_, client):
        await client.get("/livez")
        return await client.request(method, path, headers=headers)


async def test_the_version_is_that_of_the_front_end_beside_our_own() -> None:
    import vllm

    assert (await get("/version")).json() == {"version": vllm.__version__, "tokenyard": __version__}


async def test_metrics_are_served_where_anybody_may_ask() -> None:
    answer = await get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'tokenyard_http_answers_total{path="/livez",status="200"} 1.0' in answer.text


async def test_with_keys_metrics_are_not_for_clients() -> None:
    assert (await get("/metrics", keys="required")).status_code == 401


@pytest.mark.parametrize(
    ("keys", "status", "kind"),
    [("required", 401, "authentication_error"), ("off", 405, "invalid_request_error")],
)
async def test_the_clients_of_messages_get_errors_that_they_can_read(
    keys: Literal["off", "required"], status: int, kind: str
) -> None:
    answer = await get("/v1/messages", keys)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
    assert answer.json()["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *(("HEAD", "/v1/models", "GET"), ("POST", "/v1/models", "GET"), ("POST", "/health", "GET")),
        *(("PUT", "/v1/models/a/b", "GET"), ("GET", "/v1/completions", "POST")),
        *(("PATCH", "/v1/responses/resp_x", "GET, DELETE"), ("OPTIONS", "/tokenize", "POST")),
        *(("GET", "/v1/messages", "POST"), ("GET", "/v1/responses/x/cancel", "POST")),
    ],
)
async def test_another_method_is_refused_with_those_that_there_are(
    method: str, path: str, allowed: str
) -> None:
    answer = await get(path, method=method)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/models/?a=b&c=%C3%B6", "/v1/models?a=b&c=%C3%B6"),
        ("/v1/models/%C3%B6/", "/v1/models/%C3%B6"),
        ("/v1/chat/completions//", "/v1/chat/completions"),
        *(("/v1/files/", "/v1/files"), ("/v1/responses/", "/v1/responses")),
        ("/v1/responses/resp_x/input_items/", "/v1/responses/resp_x/input_items"),
        ("/health/", "/health"),
    ],
)
async def test_a_slash_too_many_is_redirected(method: str, path: str, place: str) -> None:
    answer = await get(path, method=method)
    assert (answer.status_code, answer.headers["location"]) == (307, place)


@pytest.mark.parametrize(
    "path", ["/", "//", "/nothing/", "//evil.example/", "/v1/", "/v1/responses/resp_x/x/y"]
)
async def test_no_other_path_is_redirected(path: str) -> None:
    assert (await get(path)).status_code == 404


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/completions", "did you mean /v1/completions?"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/v1/detokenize", "did you mean /detokenize?"),
        *((path, "see GET /openapi.json") for path in ("/v1/nothing", "/", "/v1/v1/detokenize")),
    ],
)
async def test_the_error_names_the_endpoint_that_was_meant(path: str, hint: str) -> None:
    answer = await get(path, method="POST")
    assert answer.json()["error"]["message"] == f"there is no POST {path}; {hint}"


@pytest.mark.parametrize("path", ["/version", "/health", "/nothing", "/v1/messages"])
async def test_each_answer_has_the_clients_own_name_of_the_request(path: str) -> None:
    answer = await get(path, **{"X-Request-Id": "mesh/1"})
    assert answer.headers.get_list("x-request-id") == ["mesh/1"]
    if path == "/v1/messages":
        assert answer.headers["request-id"] == answer.json()["request_id"] == "mesh/1"


async def test_a_fault_of_the_gateway_is_an_error_in_json() -> None:
    answer = await get("/health")  # this one has nobody to ask
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.long
@pytest.mark.parametrize("needs_key", [False, True])
async def test_the_document(needs_key: bool) -> None:
    keys = "required" if needs_key else "off"
    async with lone_gateway(keys=keys, board=False) as (gateway, _):
        document: dict[str, Any] = json.loads(await gateway._openapi.read())

    assert ("/metrics" in document["paths"]) is not needs_key
    assert ("security" in document) is needs_key
    assert document["paths"]["/livez"]["get"]["security"] == []
    described = {
        (method.upper(), path): one
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    }
    served = {(one.method, one.path.replace(":path", "")) for one in gateway._router.routes}
    assert described.keys() == served
    for one in described.values():
        assert one["responses"].keys() == {"200", "default"}
        assert one["description"].endswith(".")
        assert one["tags"]
