"""The bounds of a connection, tried with clients that keep to no rules."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn

from gateway.http.incoming import Bodies
from gateway.server import GatewayConnection
from tokenyard.process.http_server import BYTES_PER_S, MAX_HEAD_BYTES, bounded
from tokenyard.protocol.gateway_settings import GatewaySettings

CHUNK = b"x" * 16_384
#: Most chunks that an endless stream may send to a client that reads none.
MOST_SENT = 32 * 2**20 // len(CHUNK)
PAUSE_S = 0.1


class HeldLoop(asyncio.SelectorEventLoop):
    """Its time passes only when the test says so."""

    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def loop_factory() -> type[HeldLoop]:
    return HeldLoop


def held_loop() -> HeldLoop:
    """The running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HeldLoop)
    return loop


async def pass_time(seconds: float) -> None:
    """Let time pass, and what was due then happen."""
    held_loop().now += seconds
    for _ in range(2):
        await asyncio.sleep(0)


async def until(check: Callable[[], object]) -> None:
    """Wait for something that needs no time."""
    while not check():  # noqa: ASYNC110
        await asyncio.sleep(0)


BODIES = Bodies(GatewaySettings(redis_url="redis://127.0.0.1:1"))


class App:
    """Answers a POST with its length, a PUT before its body, a GET with an endless stream."""

    def __init__(self) -> None:
        self.sent = 0
        self.is_over = asyncio.Event()
        self.received = -1  # bytes, by the newest connection; -1 until it is made
        self.full_at = 0.0  # when the endless stream last had to wait for its reader,
        self.cut_at = 0.0  # and when it ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["method"] == "PUT":
            await send(head)
            await send({"type": "http.response.body", "body": b"no"})
            return
        if scope["method"] == "POST":
            try:
                body = b"%d" % len(await BODIES.read(receive, "me"))
            finally:
                self.is_over.set()
            await send(head)
            await send({"type": "http.response.body", "body": body})
            return
        await send(head)
        disconnected = asyncio.create_task(self._disconnected(receive))
        while not disconnected.done():
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            self.sent += 1
            await asyncio.sleep(0)
        self.cut_at = held_loop().now

    @staticmethod
    async def _disconnected(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class WatchedConnection(GatewayConnection):
    """Tells the app what it does not hear."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watching.received = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watching.received += len(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watching.full_at = held_loop().now

    @property
    def _watching(self) -> App:
        app = self.config.app
        assert isinstance(app, App)
        return app


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[App, int]]:
    app = App()
    given = GatewaySettings(redis_url="redis://unused", **settings)
    protocol = bounded(given, WatchedConnection)
    config = uvicorn.Config(
        app, http=protocol, lifespan="off", log_config=None, timeout_keep_alive=round(given.idle_s)
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(server._serve([listener]))
    await until(lambda: server.started)
    try:
        yield app, listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        while not running.done():
            await pass_time(0.1)
        await running


async def said(app: App, port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts, with a pause when each has come; all that the server answers until it closes."""
    app.received = -1
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: app.received == 0)
    answer, sent = b"", 0

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
            sent += len(part)
            while app.received < sent and not listening.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await pass_time(pause_s)
    await listening
    writer.close()
    return answer


def post(length: int, *headers: bytes) -> bytes:
    lines = [b"POST / HTTP/1.1", b"host: x", b"content-length: %d" % length, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def silence(seconds: float) -> list[bytes]:
    """Parts of nothing, with pauses of `PAUSE_S`."""
    return [b""] * round(seconds / PAUSE_S)


async def test_who_was_answered_before_the_end_of_the_body_gets_no_second_answer() -> None:
    async with served(receive_s=2.0) as (app, port):
        parts = b"PUT" + post(100).removeprefix(b"POST"), b"half", *silence(2.0)
        answer = await said(app, port, *parts, pause_s=PAUSE_S)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert answer.count(b"HTTP/1.1 ") == 1, answer


async def is_answered(app: App, port: int) -> None:
    answer = await said(app, port, post(5, b"connection: close"), b"hello")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b"\r\n5\r\n" in answer


async def test_a_whole_request_is_answered() -> None:
    async with served() as (app, port):
        await is_answered(app, port)


@pytest.mark.parametrize(
    "head",
    [
        post(0, b"a: " + b"x" * MAX_HEAD_BYTES),
        b"GET / HTTP/1.1\r\na: " + b"x" * (MAX_HEAD_BYTES + 1),  # without an end
        b"GET /" + b"x" * (MAX_HEAD_BYTES + 1),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEAD_BYTES // 6),
    ],
)
async def test_a_head_that_is_too_large_is_refused(head: bytes) -> None:
    async with served() as (app, port):
        answer = await said(app, port, head)
        assert answer.startswith(b"HTTP/1.1 431"), answer[:200]
        assert b'"error"' in answer
        assert not app.is_over.is_set()


@pytest.mark.parametrize("parts", [[post(100), *[b"x"] * 100], [bytes([one]) for one in post(0)]])
async def test_a_request_that_comes_byte_by_byte_is_refused(parts: list[bytes]) -> None:
    async with served(receive_s=0.3) as (app, port):
        answer = await said(app, port, *parts, pause_s=0.02)
        assert answer.startswith(b"HTTP/1.1 408"), answer


async def test_a_slow_request_for_a_message_is_refused_in_anthropics_form() -> None:
    async with served(receive_s=0.3) as (app, port):
        ask = post(100).replace(b"POST / ", b"POST /v1/messages?beta=true ")
        answer = await said(app, port, ask, *[b"x"] * 100, pause_s=0.02)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408"), head
        assert json.loads(body)["type"] == "error"


async def test_a_large_request_may_take_longer() -> None:
    async with served(receive_s=0.2) as (app, port):
        # Twenty seconds' worth
        part = b"x" * BYTES_PER_S
        first = post(20 * len(part), b"connection: close") + part
        answer = await said(app, port, first, 10 * part, 9 * part, pause_s=1.0)
        assert answer.startswith(b"HTTP/1.1 200"), answer


async def test_an_idle_connection_is_closed() -> None:
    async with served(receive_s=2.0, idle_s=1) as (app, port):
        assert await said(app, port, *silence(2.1), pause_s=PAUSE_S) == b""
        answer = await said(app, port, b"\r\n", *silence(2.1), pause_s=PAUSE_S)
        assert answer.startswith(b"HTTP/1.1 408")
        # After an answer, it may be idle for another time.
        answer = await said(app, port, post(0), *silence(1.1), pause_s=PAUSE_S)
        assert answer.startswith(b"HTTP/1.1 200")


async def test_who_reads_nothing_costs_little_and_is_cut_off() -> None:
    async with served(send_s=2.0) as (app, port):
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
            # I expect the stream to stand still, and others to be served,
            assert seen < MOST_SENT
            await asyncio.sleep(0)
        await is_answered(app, port)
        assert not app.cut_at
        # and the connection to be cut, when it has stood still for its time.
        while not app.cut_at:
            await pass_time(PAUSE_S)
        assert app.sent < MOST_SENT
        # The app hears of it a few turns later.
        assert app.cut_at - app.full_at == pytest.approx(2.0, abs=5 * PAUSE_S)
        writer.close()
