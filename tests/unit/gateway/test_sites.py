"""The gateway and pages of other sites: all paths, the content type, and CORS for those listed."""

from __future__ import annotations

import pytest

from tests.unit.gateway.conftest import lone_gateway
from tests.unit.gateway.test_board import settings
from tokenyard.protocol.errors import SettingsError

PATHS = [
    *("/v1/responses", "/v1/batches", "/v1/files"),
    *("/v1/chat/completions", "/tokenize", "/v1/models"),
    *("/v1/messages", "/v1/batches/x/cancel", "/health", "/livez"),
    *("/version", "/metrics", "/board/"),
    *("/openapi.json", "/nothing"),
]
APP = "https://app.example.com"


async def test_each_path_knows_host_and_origin() -> None:
    async with lone_gateway() as (_, client):
        for path in PATHS:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                for headers in (
                    {"host": "evil.example"},
                    {"host": "evil.example", "origin": "http://evil.example"},
                    {"origin": "http://evil.example", "content-type": "text/plain"},
                    {"origin": "null"},
                    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
                ):
                    answer = await client.request(method, path, headers=headers)
                    assert answer.status_code == 403, (method, path, headers)
                    assert "access-control-allow-origin" not in answer.headers
        page = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
        assert (await client.get("/livez", headers=page)).status_code == 200
        error = (await client.get("/livez", headers={"host": "evil.example"})).json()["error"]
        assert error["type"] == "permission_error"
        assert "`hosts`" in error["message"]


async def test_a_listed_name_reaches_the_api_and_not_a_board_without_keys() -> None:
    async with lone_gateway(hosts=("https://api.example.com",)) as (_, client):
        proxied = {"host": "api.example.com", "x-forwarded-for": "10.0.0.1"}
        assert (await client.get("/version", headers=proxied)).status_code == 200
        assert (await client.get("/board/", headers=proxied)).status_code == 403


async def test_with_keys_a_probe_may_call_it_by_any_name() -> None:
    async with lone_gateway(host="0.0.0.0") as (_, client):
        for host in ("10.2.3.4:8000", "gateway.llm.svc"):
            assert (await client.get("/livez", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "a;json"]
)
async def test_json_is_known_by_its_content_type_as_in_vllm(kind: str | None) -> None:
    async with lone_gateway() as (_, client):
        headers = {} if kind is None else {"content-type": kind}
        for path in ("/v1/responses", "/v1/completions", "/v1/messages", "/tokenize"):
            answer = await client.post(path, content=b"{}", headers=headers)
            assert (answer.status_code, "application/json" in answer.text) == (400, True), path
            typed = {"content-type": "Application/JSON; charset=utf-8"}
            answer = await client.post(path, content=b"{}", headers=typed)
            assert "no host has announced a model" in answer.text, "it has been read"


async def test_pages_of_listed_origins_may_use_the_api_but_not_the_board() -> None:
    async with lone_gateway(origins=(APP,)) as (_, client):
        asks = {
            "origin": APP,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type, x-stainless-os",
        }
        preflight = await client.options("/v1/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == APP
        assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
        other = await client.options("/v1/completions", headers=asks | {"origin": f"{APP}.evil"})
        assert "access-control-allow-origin" not in other.headers

        page = {"origin": APP, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
        for path, status in (("/version", 200), ("/nothing", 404)):
            answer = await client.get(path, headers=page)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == APP, "errors are read, too"
            assert answer.headers["access-control-expose-headers"] == "*"
        board = await client.get("/board/", headers=page)
        assert (board.status_code, "access-control-allow-origin" in board.headers) == (403, False)


@pytest.mark.parametrize("origin", ["*", f"{APP}/", "app.example.com", "HTTPS://app.example.com"])
def test_origins_that_cannot_be(origin: str) -> None:
    with pytest.raises(SettingsError, match="origins"):
        settings(origins=(origin,))


def test_all_origins_are_listed_only_where_pages_need_a_key() -> None:
    assert settings(origins=("*",), keys="required").origins == ("*",)
