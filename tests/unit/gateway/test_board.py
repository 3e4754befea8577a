"""The board in a gateway: where it is, what it costs the API, and what its end is."""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.app import is_of_board
from gateway.server import open_board
from tests.support.waiting import eventually
from tests.unit.gateway.conftest import NOWHERE, lone_gateway
from tokenyard.board import app as board
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.texts import pip_install


def settings(**given: Any) -> GatewaySettings:
    return GatewaySettings(redis_url=NOWHERE, **given)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        *(("/board", True), ("/board/", True), ("/board/x/y", True), ("/board//", True)),
        *(("/boards", False), ("/boardx/", False), ("/v1/board/", False), ("//board/", False)),
        *(("/BOARD/", False), ("/", False), ("", False), ("/v1/models", False)),
    ],
)
def test_its_paths(path: str, expected: bool) -> None:
    assert is_of_board(path) is expected


@pytest.mark.long
async def test_it_lies_beside_the_api_which_does_not_see_its_requests() -> None:
    async with lone_gateway() as (_, client):
        answer = await client.get("/board/static/board.js")
        assert answer.status_code == 200
        page = await client.get("/board/audit")
        assert (page.status_code, "Redis" in page.text) == (503, True)  # there is no broker
        assert "content-security-policy" in page.headers
        assert (await client.get("/board/%2e%2e/v1/models")).status_code == 404
        api = await client.get("/boards")
        assert api.json()["error"]["type"] == "not_found_error"
        assert "content-security-policy" not in api.headers
        # All its paths are one in the metrics.
        text = (await client.get("/metrics")).text
        assert 'answers_total{path="/board",status="200"} 1.0' in text
        assert 'answers_total{path="/board",status="503"} 1.0' in text
        assert "board.js" not in text


async def test_it_asks_for_keys_where_the_api_does() -> None:
    async with lone_gateway(keys="required") as (_, client):
        answer = await client.get("/board/")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/board/login?back=%2Fboard%2F"


async def test_without_it_its_paths_are_none() -> None:
    async with lone_gateway(board=False) as (_, client):
        assert (await client.get("/board/")).status_code == 404


def test_a_gateway_runs_without_what_the_board_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("tokenyard.board")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert open_board(settings()) is None
    assert f"no board: this needs jinja2: {pip_install('board')}" in caplog.text


async def test_a_gateway_that_stops_ends_its_open_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a page that has been sent something
    live_event = Mock(side_effect=board._event)
    monkeypatch.setattr(board, "_event", live_event)
    async with lone_gateway() as (app, client):
        headers = {"accept": "text/event-stream"}
        looking = asyncio.create_task(client.get("/board/audit", headers=headers, timeout=60))
        await asyncio.to_thread(eventually, lambda: live_event.called)
        assert not looking.done()
        app.drain()
        await asyncio.wait_for(app.drained(50), 50)
        assert "live_error" in (await looking).text
        assert (await client.get("/board/")).status_code == 503


@pytest.mark.parametrize(
    "given",
    [
        {"hosts": ("board example",)},
        {"hosts": ("http://board.example.com",)},
        {"hosts": ("board.example.com:443",)},
        {"board_session_s": 0},
        {"board_max_streams": 0},
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(given))):
        settings(**given)


def test_settings_that_can() -> None:
    hosts = ("board.example.com", "https://board.example.com", "[2001:db8::1]", "10.0.0.1")
    assert settings(hosts=hosts).hosts == hosts
