"""Media are fetched from the listed domains alone, within bounds."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError
from tests.support.brokers import Certificates
from tests.support.builders import random_name
from tests.support.fake_clock import FakeClock
from tests.unit.gateway.conftest import vllm_params
from tokenyard import clock
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import GatewaySettings

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def context(client: str = "me") -> RequestContext:
    return RequestContext(durable_id=random_name("request"), client=client, created=1.0)


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

    @property
    def domain(self) -> str:
        """As it is listed."""
        return f"127.0.0.1:{self.port}"

    def url(self, host: str = "127.0.0.1", path: str = "/x.png") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    found = Site()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0, ssl=tls)
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
        content = await fetcher(site.domain).content(site.url(), asked, 20.0)
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
        "http://example.com:22/x",
        "https://example.com:80/x",
        "http://xn--a-.com/x",
        "http://xn--/x",
        "http://a%3ab@example.com/x",
        "http://user:word@example.com/x",
        "http://\u20ac@example.com/x",
        "http://example.com:99999/x",
        "data:image/png,abc",
    ],
)
async def test_no_other_host_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpcore

    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(httpcore.AsyncConnectionPool, "stream", connect)
    status, message = await refusal(url, "example.com")
    assert status == 400
    assert len(message) < 300


async def test_a_name_of_a_private_network_is_not_asked() -> None:
    async with serving() as site:
        # Given a name that is listed, and leads to this machine
        status, message = await refusal(site.url("localhost"), f"localhost:{site.port}")
        assert (status, site.asked) == (400, [])
        assert "not public" in message


async def test_the_address_that_was_checked_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as site:
        # Given a name whose first answer is a public address, and the second is not
        made = fetcher(f"pictures.test:{site.port}")
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
        ("192.0.0.192", False),
        ("168.63.129.16", False),
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


async def test_the_name_in_the_url_must_be_that_of_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Certificates(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made.certificate, made.key)
    fetcher()
    from gateway.frontend import fetching

    monkeypatch.setattr(fetching, "is_public", lambda _: True)
    monkeypatch.setattr(fetching, "_PAUSE_S", 0.0)
    async with serving(tls) as site:
        names = [f"{name}:{site.port}" for name in ("localhost", "127.0.0.1", "other.test")]
        site.answers = [PICTURE] * 9
        localhost = f"https://{names[0]}/x"
        assert await refusal(localhost, *names) == (
            502,
            f"'{localhost}' could not be fetched: ConnectError",
        )
        trusting = ssl.create_default_context(cafile=str(made.authority))
        monkeypatch.setattr(fetching, "_ssl_context", lambda: trusting)
        for name in names[:2]:
            url = f"https://{name}/x"
            assert await fetcher(*names).content(url, context(), 20.0) == b"picture"

        async def look(*_: Any, **__: Any) -> Any:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", site.port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look)
        assert (await refusal(f"https://{names[2]}/x", *names))[0] == 502


async def test_a_redirect_is_not_followed() -> None:
    async with serving() as site:
        site.answers = [answered(f"302 Found\r\nLocation: {site.url(path='/other')}"), PICTURE]
        status, message = await refusal(site.url(), site.domain)
        assert (status, len(site.asked)) == (422, 1)
        assert "redirects are not followed" in message


async def test_what_is_not_there_is_asked_for_once() -> None:
    async with serving() as site:
        site.answers = [answered("404 Not Found"), PICTURE]
        status, message = await refusal(site.url(), site.domain)
        assert (status, len(site.asked)) == (422, 1)
        assert "HTTP 404" in message


async def test_what_is_compressed_is_not_unpacked() -> None:
    async with serving() as site:
        site.answers = [answered("200 OK\r\nContent-Encoding: gzip", b"\x1f\x8b")]
        status, message = await refusal(site.url(), site.domain)
        assert status == 422
        assert "compressed" in message


async def test_a_site_that_fails_is_asked_again(fake_clock: FakeClock) -> None:
    async with serving() as site:

        async def cut(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npict")

        site.answers = [answered("503 Busy"), cut, PICTURE]
        before = fake_clock.now
        asked = context()
        assert await fetcher(site.domain).content(site.url(), asked, 20.0) == b"picture"
        assert (len(site.asked), fake_clock.now - before) == (3, 1 + 2)
        assert asked.fetched_bytes == 7


@pytest.mark.usefixtures("fake_clock")
async def test_a_site_that_goes_on_failing_is_told() -> None:
    async with serving() as site:
        site.answers = [answered("503 Busy")] * 4
        status, message = await refusal(site.url(), site.domain)
        assert (status, len(site.asked)) == (502, 3)
        assert "HTTP 503" in message


async def test_no_site_sends_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as site:

        async def endless(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()

        made = fetcher(site.domain)
        from gateway.frontend import fetching

        monkeypatch.setattr(fetching, "MAX_MEDIA_BYTES", 3 << 20)
        site.answers = [answered("200 OK", bytes(2 << 20)), endless, PICTURE]
        asked = context()
        await made.content(site.url(), asked, 20.0)
        # When one request asks for more than its bound in two pictures
        with pytest.raises(GatewayError, match="more than 3145728 bytes"):
            await made.content(site.url(), asked, 20.0)
        assert await made.content(site.url(), context(), 20.0) == b"picture"


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000, "sent too much"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 10_000, "sent too much"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000, "sent too much"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nb\r\n" * 200_000,
            "too small pieces",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 300_000,
            "ProtocolError",
        ),
        (b"SSH-2.0-secret\r\n", "ProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "ProtocolError"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n",
            "ProtocolError",
        ),
    ],
)
@pytest.mark.usefixtures("fake_clock")
async def test_no_site_sends_more_than_its_picture(
    piece: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flood(writer: asyncio.StreamWriter) -> None:
        for _ in range(100):
            writer.write(piece)
            await writer.drain()

    fetcher()
    from gateway.frontend import fetching

    monkeypatch.setattr(fetching, "MAX_MEDIA_BYTES", 1 << 19)
    async with serving() as site:
        site.answers = [flood] * 3
        asked = context()
        with pytest.raises(GatewayError) as refused:
            await fetcher(site.domain).content(site.url(path="/x?secret"), asked, 60.0)
    assert why in refused.value.message
    assert "secret" not in refused.value.message


async def test_what_a_request_has_fetched_does_not_wait_for_a_place_of_others() -> None:
    async with serving() as site:
        made, may_end = fetcher(site.domain), asyncio.Event()

        async def slow(writer: asyncio.StreamWriter) -> None:
            await may_end.wait()
            await PICTURE(writer)

        # Given four requests that fetch, of which each has something and waits for the rest
        site.answers = [PICTURE, slow] * 4 + [PICTURE]
        asked = []
        for _ in range(4):
            request = context()
            some = [made.content(site.url(), request, 60.0) for _ in range(2)]
            asked.append(asyncio.ensure_future(asyncio.gather(*some)))
            while request.fetched_bytes != 7:
                await clock.pause(0)
        late = asyncio.ensure_future(made.content(site.url(), context(), 60.0))
        for _ in range(100):
            await clock.pause(0)
        assert len(site.asked) == 8, "a fifth fetches"
        may_end.set()
        assert await asyncio.gather(*asked) == [[b"picture"] * 2] * 4
        assert await late == b"picture"


async def test_all_that_a_request_fetches_has_one_bound_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await writer.wait_closed()

    fetcher()
    from gateway.frontend import fetching

    monkeypatch.setattr(fetching, "_ALL_S", 0.05)
    async with serving() as site:
        site.answers = [silent]
        status, message = await refusal(site.url(), site.domain)
    assert (status, len(site.asked)) == (502, 1)
    assert "0.05 s" in message


async def test_a_client_fetches_a_few_at_a_time_and_others_meanwhile() -> None:
    async with serving() as site:
        made = fetcher(site.domain)
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
        status, _ = await refusal(site.url(), site.domain, timeout_s=0.05)
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

    monkeypatch.setattr(fetching, "MAX_MEDIA_BYTES", 20)
    made = fetching.MediaFetcher((), read)
    request = context()
    request.tenant = "alice"
    assert await made.content("file-1", request, 20.0) == b"picture"
    assert await made.content("file-1", request, 20.0) == b"picture"
    assert asked == [("alice", "file-1", 20)] * 3 + [("alice", "file-1", 13)]
    assert await made.content("file-1", None, 20.0)
    assert len(asked) == 4
    assert fake_clock.now == 1000 + 1 + 2

    status, message = await refusal("file-1")  # a gateway without files
    assert (status, len(asked)) == (400, 4)
    assert "not fetched" in message


async def test_nothing_is_fetched_where_only_tokens_are_counted() -> None:
    async with serving() as site:
        made = fetcher(site.domain)
        assert await made.content(site.url(), None, 20.0)
        with pytest.raises(GatewayError, match="not fetched"):
            await made.content("http://10.0.0.1/", None, 20.0)
        assert site.asked == []


@pytest.mark.parametrize("domain", ["https://a.com", "a.com/x", "A.com", "::1", "*", "a.com:x", ""])
def test_a_domain_is_a_host(domain: str) -> None:
    for right in ("a.com", "10.1.2.3:9000", "[2001:db8::1]:8080", "xn--e1afmkfd.test"):
        GatewaySettings(redis_url="redis://127.0.0.1:1", allowed_media_domains=(right,))
    with pytest.raises(SettingsError, match=re.escape(f"{domain!r} is not like images.example")):
        GatewaySettings(redis_url="redis://127.0.0.1:1", allowed_media_domains=(domain,))
