"""The board in a gateway: where it is, what it costs the API, and what its end is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from gateway.http.board import is_of_board, open_board
from tests.support.waiting import eventually
from tests.unit.gateway.conftest import adder_tokenizer
from tokenyard.board import app
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.texts import pip_install

pytestmark = pytest.mark.vllm

NOWHERE = "redis://127.0.0.1:1"
Test = Callable[[Any, httpx.AsyncClient], Awaitable[None]]


def settings(**given: Any) -> GatewaySettings:
    return GatewaySettings(redis_url=NOWHERE, **given)


def with_gateway(test: Test, **given: Any) -> None:
    """A gateway that nobody connects to a broker."""
    adder_tokenizer()  # sets vLLM's environment first
    from gateway.app import Gateway
    from gateway.frontend.models import FrontEnds
    from gateway.models import ModelWatch
    from gateway.queue.yard import YardQueue

    async def run() -> None:
        own = settings(**given)
        queue = YardQueue(NOWHERE, "nowhere")
        front_ends = FrontEnds(queue)
        watch = ModelWatch(queue, front_ends, own.refresh_s)
        board = open_board(own)
        health: Any = SimpleNamespace(lost="")
        app: Any = Gateway(own, queue, front_ends, watch, health, None, board)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await test(app, client)
        if board is not None:
            board.close()

    asyncio.run(asyncio.wait_for(run(), 60))


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
def test_it_lies_beside_the_api_which_does_not_see_its_requests() -> None:
    async def test(app: Any, client: httpx.AsyncClient) -> None:
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

    with_gateway(test)


def test_it_asks_for_keys_where_the_api_does() -> None:
    async def test(app: Any, client: httpx.AsyncClient) -> None:
        answer = await client.get("/board/")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/board/login?back=%2Fboard%2F"

    with_gateway(test, keys="required")


def test_without_it_its_paths_are_none() -> None:
    async def test(app: Any, client: httpx.AsyncClient) -> None:
        assert (await client.get("/board/")).status_code == 404

    with_gateway(test, board=False)


def test_a_gateway_runs_without_what_the_board_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("tokenyard.board")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert open_board(settings()) is None
    assert f"no board: this needs jinja2: {pip_install('board')}" in caplog.text


def test_a_gateway_that_stops_ends_its_open_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a page that has been sent something
    live_event = Mock(side_effect=app._event)
    monkeypatch.setattr(app, "_event", live_event)

    async def test(app: Any, client: httpx.AsyncClient) -> None:
        headers = {"accept": "text/event-stream"}
        looking = asyncio.create_task(client.get("/board/audit", headers=headers, timeout=60))
        await asyncio.to_thread(eventually, lambda: live_event.called)
        assert not looking.done()
        app.drain()
        await asyncio.wait_for(app.drained(50), 50)
        assert "live_error" in (await looking).text
        assert (await client.get("/board/")).status_code == 503

    with_gateway(test)


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
