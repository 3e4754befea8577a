"""Media are fetched from the listed domains alone, within bounds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError
from tests.support.fake_clock import FakeClock
from tests.unit.gateway.conftest import vllm_params

pytestmark = pytest.mark.vllm

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def context(client: str = "me") -> RequestContext:
    return RequestContext(durable_id="a" * 32, client=client, created=1.0)


def answered(head: str, body: bytes = b"") -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    return write


PICTURE = answered("200 OK", b"picture")


class Site:
    """A server at loopback that answers each request as the next of ``answers``."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, bytes]] = []  # by local address
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append((writer.get_extra_info("sockname")[0], head))
        try:
            await self.answers.pop(0)(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def url(self, host: str = "127.0.0.1", path: str = "/x.png") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    found = Site()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    other = await asyncio.start_server(found.serve, "127.0.0.2", found.port)
    async with server, other:
        yield found


def fetcher(*domains: str) -> Any:
    vllm_params()  # sets vLLM's environment first
    from gateway.frontend.fetching import MediaFetcher

    return MediaFetcher(domains)


async def refusal(url: str, *domains: str, timeout_s: float = 20.0) -> tuple[int, str]:
    with pytest.raises(GatewayError) as refused:
        await fetcher(*domains).content(url, context(), timeout_s)
    return refused.value.status, refused.value.message


async def test_a_listed_address_is_meant_as_it_stands() -> None:
    async with serving() as site:
        site.answers = [PICTURE]
        asked = context()
        content = await fetcher("127.0.0.1").content(site.url(), asked, 20.0)
        assert content == b"picture"
        assert asked.fetched_bytes == len(content)
        ((_, head),) = site.asked
        assert head.startswith(b"GET /x.png HTTP/1.1\r\n")
        assert b"Accept-Encoding: identity\r\n" in head
        assert b"cookie" not in head.lower()


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com.evil.org/x",
        "http://evil.org/example.com",
        "http://evil.org#example.com",
        "http://evil.org?example.com",
        "http://example.com@evil.org/x",
        "http://example.com:80@evil.org/x",
        "http://evil.org\\@example.com/x",
        "http://example.com\\@evil.org/x",
        "http://example.com\t.evil.org/x",
        "http://example.com./x",
        "http://example.com%2eevil.org/x",
        "http://ex%61mple.com/x",
        "http://[::1]/x",
        "http://[::ffff:127.0.0.1]/x",
        "http://127.1/x",
        "http://0x7f000001/x",
        "http://2130706433/x",
        "http:///x",
        "http:example.com/x",
        "//example.com/x",
        "ftp://example.com/x",
        "file://example.com/etc/passwd",
        "file:///etc/passwd",
        "gopher://example.com/x",
        "media:" + "0" * 64,
        "",
        "http://[/x",
        "http://example.com:99999/x",
        "data:image/png,abc",
    ],
)
async def test_no_other_host_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import aiohttp

    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(aiohttp.ClientSession, "_request", connect)
    status, message = await refusal(url, "example.com")
    assert status == 400
    assert len(message) < 300


async def test_a_name_of_a_private_network_is_not_asked() -> None:
    async with serving() as site:
        # Given a name that is listed, and leads to this machine
        status, message = await refusal(site.url("localhost"), "localhost")
        assert (status, site.asked) == (400, [])
        assert "not public" in message


async def test_the_address_that_was_checked_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as site:
        # Given a name whose first answer is a public address, and the second is not
        made = fetcher("pictures.test")
        from gateway.frontend import fetching

        answers = ["127.0.0.2", "127.0.0.1"]

        async def look(*_: Any, **__: Any) -> Any:
            address = (answers.pop(0), site.port)
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address)]

        monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.2")
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look)
        site.answers = [PICTURE]
        url = site.url("pictures.test")

        assert await made.content(url, context(), 20.0) == b"picture"
        with pytest.raises(GatewayError, match="not public"):
            await made.content(url, context(), 20.0)
        assert [address for address, _ in site.asked] == ["127.0.0.2"]


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1", True),
        ("64:ff9b::808:808", True),  # 8.8.8.8 behind NAT64
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("224.0.1.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::7f00:1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::1", False),
        ("2002:7f00:1::", False),
        ("2001:0:7f00:1::", False),
        ("fc00::1", False),
        ("fe80::1%eth0", False),
        ("ff0e::1", False),
    ],
)
def test_which_addresses_are_public(address: str, is_one: bool) -> None:
    fetcher()
    from gateway.frontend.fetching import is_public

    assert is_public(address) is is_one


async def test_a_redirect_is_not_followed() -> None:
    async with serving() as site:
        site.answers = [answered(f"302 Found\r\nLocation: {site.url(path='/other')}"), PICTURE]
        status, message = await refusal(site.url(), "127.0.0.1")
        assert (status, len(site.asked)) == (422, 1)
        assert "redirects are not followed" in message


async def test_what_is_not_there_is_asked_for_once() -> None:
    async with serving() as site:
        site.answers = [answered("404 Not Found"), PICTURE]
        status, message = await refusal(site.url(), "127.0.0.1")
        assert (status, len(site.asked)) == (422, 1)
        assert "HTTP 404" in message


async def test_what_is_compressed_is_not_unpacked() -> None:
    async with serving() as site:
        site.answers = [answered("200 OK\r\nContent-Encoding: gzip", b"\x1f\x8b")]
        status, message = await refusal(site.url(), "127.0.0.1")
        assert status == 422
        assert "compressed" in message


async def test_a_site_that_fails_is_asked_again(fake_clock: FakeClock) -> None:
    async with serving() as site:

        async def cut(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npict")

        site.answers = [answered("503 Busy"), cut, PICTURE]
        before = fake_clock.now
        asked = context()
        assert await fetcher("127.0.0.1").content(site.url(), asked, 20.0) == b"picture"
        assert (len(site.asked), fake_clock.now - before) == (3, 1 + 2)
        assert asked.fetched_bytes == 7


@pytest.mark.usefixtures("fake_clock")
async def test_a_site_that_goes_on_failing_is_told() -> None:
    async with serving() as site:
        site.answers = [answered("503 Busy")] * 4
        status, message = await refusal(site.url(), "127.0.0.1")
        assert (status, len(site.asked)) == (502, 3)
        assert "HTTP 503" in message


async def test_no_site_sends_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as site:

        async def endless(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()

        made = fetcher("127.0.0.1")
        from gateway.frontend import fetching

        monkeypatch.setattr(fetching, "MAX_MEDIA_BYTES", 3 << 20)
        site.answers = [answered("200 OK", bytes(2 << 20)), endless, PICTURE]
        asked = context()
        await made.content(site.url(), asked, 20.0)
        # When one request asks for more than its bound in two pictures
        with pytest.raises(GatewayError, match="more than 3145728 bytes"):
            await made.content(site.url(), asked, 20.0)
        assert await made.content(site.url(), context(), 20.0) == b"picture"


async def test_a_client_fetches_a_few_at_a_time_and_others_meanwhile() -> None:
    async with serving() as site:
        made = fetcher("127.0.0.1")
        may_end, all_begun = asyncio.Event(), asyncio.Event()

        async def slow(writer: asyncio.StreamWriter) -> None:
            if len(site.asked) == 4:
                all_begun.set()
            await may_end.wait()
            await PICTURE(writer)

        site.answers = [slow] * 4 + [PICTURE] * 5
        one = [asyncio.create_task(made.content(site.url(), context("a"), 60.0)) for _ in range(8)]
        await all_begun.wait()
        assert await made.content(site.url(), context("b"), 60.0) == b"picture"
        assert len(site.asked) == 5
        may_end.set()
        assert await asyncio.gather(*one) == [b"picture"] * 8


@pytest.mark.usefixtures("fake_clock")
async def test_a_site_that_says_nothing_is_not_waited_for() -> None:
    async with serving() as site:

        async def silent(writer: asyncio.StreamWriter) -> None:
            await writer.wait_closed()

        site.answers = [silent] * 3
        status, _ = await refusal(site.url(), "127.0.0.1", timeout_s=0.05)
        assert status == 502


async def test_a_file_is_read_for_its_tenant(
    monkeypatch: pytest.MonkeyPatch, fake_clock: FakeClock
) -> None:
    fetcher()
    from gateway.frontend import fetching

    asked: list[tuple[str, str, int]] = []
    faults: list[Exception] = [OSError("no bucket"), FileNotFoundError("gone")]

    def read(tenant: str, file_id: str, most: int) -> bytes:
        asked.append((tenant, file_id, most))
        if faults:
            raise faults.pop()
        return b"picture"

    monkeypatch.setattr(fetching, "MAX_MEDIA_BYTES", 10)
    made = fetching.MediaFetcher((), read)
    request = context()
    request.tenant = "alice"
    assert await made.content("file-1", request, 20.0) == b"picture"
    assert await made.content("file-1", request, 20.0) == b"picture"
    assert asked == [("alice", "file-1", 10)] * 3 + [("alice", "file-1", 3)]
    assert await made.content("file-1", None, 20.0)
    assert len(asked) == 4
    assert fake_clock.now == 1000 + 1 + 2

    status, message = await refusal("file-1")  # a gateway without files
    assert (status, len(asked)) == (400, 4)
    assert "not fetched" in message


async def test_nothing_is_fetched_where_only_tokens_are_counted() -> None:
    async with serving() as site:
        made = fetcher("127.0.0.1")
        assert await made.content(site.url(), None, 20.0)
        with pytest.raises(GatewayError, match="not fetched"):
            await made.content("http://10.0.0.1/", None, 20.0)
        assert site.asked == []
