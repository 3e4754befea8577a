"""The bounds of a connection, tried with clients that keep to no rules."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from gateway.http.connection import GatewayConnection
from gateway.http.incoming import read_body
from tokenyard.process.http_connection import BYTES_PER_S, MAX_HEAD_BYTES, bounded
from tokenyard.protocol.gateway_settings import GatewaySettings

CHUNK = b"x" * 16_384


class App:
    """Answers a POST with its length, a PUT before its body, a GET with an endless stream."""

    def __init__(self) -> None:
        self.sent = 0
        self.is_over = asyncio.Event()
        self.is_cut = asyncio.Event()  # the endless stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["method"] == "PUT":
            await send(head)
            await send({"type": "http.response.body", "body": b"no"})
            return
        if scope["method"] == "POST":
            try:
                body = b"%d" % len(await read_body(receive, 2**20))
            finally:
                self.is_over.set()
            await send(head)
            await send({"type": "http.response.body", "body": body})
            return
        await send(head)
        try:
            while (await self._disconnected(receive)) is False:
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                self.sent += 1
        finally:
            self.is_cut.set()

    @staticmethod
    async def _disconnected(receive: Any) -> bool:
        with contextlib.suppress(TimeoutError):
            while (await asyncio.wait_for(receive(), 0.0001))["type"] != "http.disconnect":
                pass
            return True
        return False


Test = Callable[[App, int], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[App, int]]:
    app = App()
    given = GatewaySettings(redis_url="redis://unused", **settings)
    protocol = bounded(given, GatewayConnection)
    config = uvicorn.Config(
        app, http=protocol, lifespan="off", log_config=None, timeout_keep_alive=round(given.idle_s)
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(server._serve([listener]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    try:
        yield app, listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await running


def run(test: Test, **settings: Any) -> None:
    async def scenario() -> None:
        async with served(**settings) as (app, port):
            await asyncio.wait_for(test(app, port), 60)

    asyncio.run(scenario())


async def said(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts with pauses; everything that the server answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""

    async def listen() -> None:
        nonlocal answer
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(2**16):
                answer += part

    listening = asyncio.create_task(listen())
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
    await listening
    writer.close()
    return answer


def post(length: int, *headers: bytes) -> bytes:
    lines = [b"POST / HTTP/1.1", b"host: x", b"content-length: %d" % length, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


@pytest.mark.long
def test_who_was_answered_before_the_end_of_the_body_gets_no_second_answer() -> None:
    async def test(_: App, port: int) -> None:
        answer = await said(port, b"PUT" + post(100).removeprefix(b"POST"), b"half")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert answer.count(b"HTTP/1.1 ") == 1, answer

    run(test, receive_s=2.0)


async def is_answered(app: App, port: int) -> None:
    answer = await said(port, post(5, b"connection: close"), b"hello")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b"\r\n5\r\n" in answer


def test_a_whole_request_is_answered() -> None:
    run(is_answered)


@pytest.mark.parametrize(
    "head",
    [
        post(0, b"a: " + b"x" * MAX_HEAD_BYTES),
        b"GET / HTTP/1.1\r\na: " + b"x" * (MAX_HEAD_BYTES + 1),  # without an end
        b"GET /" + b"x" * (MAX_HEAD_BYTES + 1),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEAD_BYTES // 6),
    ],
)
def test_a_head_that_is_too_large_is_refused(head: bytes) -> None:
    async def test(app: App, port: int) -> None:
        answer = await said(port, head)
        assert answer.startswith(b"HTTP/1.1 431"), answer[:200]
        assert b'"error"' in answer
        assert not app.is_over.is_set()

    run(test)


@pytest.mark.parametrize("parts", [[post(100), *[b"x"] * 100], [bytes([one]) for one in post(0)]])
def test_a_request_that_comes_byte_by_byte_is_refused(parts: list[bytes]) -> None:
    async def test(app: App, port: int) -> None:
        answer = await said(port, *parts, pause_s=0.02)
        assert answer.startswith(b"HTTP/1.1 408"), answer

    run(test, receive_s=0.3)


def test_a_slow_request_for_a_message_is_refused_in_anthropics_form() -> None:
    async def test(app: App, port: int) -> None:
        ask = post(100).replace(b"POST / ", b"POST /v1/messages?beta=true ")
        head, _, body = (await said(port, ask, *[b"x"] * 100, pause_s=0.02)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408"), head
        assert json.loads(body)["type"] == "error"

    run(test, receive_s=0.3)


def test_a_large_request_may_take_longer() -> None:
    async def test(app: App, port: int) -> None:
        # Twenty seconds' worth
        part = b"x" * BYTES_PER_S
        first = post(20 * len(part), b"connection: close") + part
        answer = await said(port, first, 10 * part, 9 * part, pause_s=0.3)
        assert answer.startswith(b"HTTP/1.1 200"), answer

    run(test, receive_s=0.2)


@pytest.mark.long
def test_an_idle_connection_is_closed() -> None:
    async def test(app: App, port: int) -> None:
        assert await said(port) == b""
        assert (await said(port, b"\r\n")).startswith(b"HTTP/1.1 408")
        # After an answer, it may be idle for another time.
        answer = await said(port, post(0))
        assert answer.startswith(b"HTTP/1.1 200")

    run(test, receive_s=2.0, idle_s=1)


@pytest.mark.long
def test_who_reads_nothing_costs_little_and_is_cut_off() -> None:
    async def test(app: App, port: int) -> None:
        # Given a client that asks for an endless stream, and reads none of it
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.read(4) == b"HTTP"
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        # It runs in this loop, so it has as many turns as we have.
        seen, turns = -1, 0
        while turns < 50:
            turns = turns + 1 if seen == app.sent else 0
            seen = app.sent
            await asyncio.sleep(0.002)
        # I expect the stream to stand still, and others to be served,
        assert seen * len(CHUNK) < 32 * 2**20
        await is_answered(app, port)
        assert app.sent == seen
        # and the connection to be cut.
        await app.is_cut.wait()
        writer.close()

    run(test, send_s=2.0)
