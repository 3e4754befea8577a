"""Fetches media: files of the tenant, and what is at domains that the operator has listed.

A request names the URL, so all that follows from it is hostile: a name may lead to an address of
the operator's own network, an answer to another place, and a few bytes may unpack to gigabytes.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from typing import Any, Final
from weakref import WeakValueDictionary

import httpcore
from vllm import envs
from yarl import URL

from gateway.batches import files
from gateway.frontend.side import at_home
from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError
from tokenyard import clock
from tokenyard.protocol.media import MAX_MEDIA_BYTES, content_of

#: Requests of a process that fetch at a time, and of one client; each holds up to
#: `MAX_MEDIA_BYTES`.
_AT_ONCE: Final = 16
_OF_A_CLIENT: Final = 4
#: Fetches of one request at a time, and how long all of them may take.
_OF_A_REQUEST: Final = 4
_ALL_S: Final = 60.0
#: Before the second attempt; twice as long before the third, and so on.
_PAUSE_S: Final = 1.0
#: Bytes of an answer's head, with those that announce it.
_HEAD_BYTES: Final = 32 * 1024
#: Pieces in which a content comes; each takes its time.
_MOST_PARTS: Final = 20_000
#: A content that is put together, or named, in a thread.
LARGE: Final = 1024 * 1024
_SHOWN: Final = 100  # characters of a URL
#: The bound of vLLM's server on an attempt to fetch a sound.
AUDIO_TIMEOUT_S: Final = envs.VLLM_AUDIO_FETCH_TIMEOUT
#: Of IPv6: what is assigned for the world, and where a network has its IPv4 addresses.
_GLOBAL: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
#: Services of a machine's own host or network, which Python takes for public.
_OWN: Final = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
_PORTS: Final = {"http": 80, "https": 443}

#: The content of a tenant's file by its id, of at most so many bytes; raises `GatewayError`.
FileReader = Callable[[str, str, int], bytes]
_Get = Callable[[RequestContext], Awaitable[bytes]]


class _Passing(Exception):
    """A fetch failed in a way that may pass."""


class MediaFetcher:
    """Gives the content of a ``data:`` URL, of an uploaded file by its id, and of other URLs."""

    def __init__(
        self, allowed_domains: Collection[str] = (), read_file: FileReader | None = None
    ) -> None:
        self._read_file = read_file
        self._allowed = frozenset(allowed_domains)
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._fetching: WeakValueDictionary[str, _Fetching] = WeakValueDictionary()

    async def content(self, url: str, context: RequestContext | None, timeout_s: float) -> bytes:
        """The content; raises `GatewayError`.

        Each attempt takes at most ``timeout_s``; all that one request fetches has at most
        `MAX_MEDIA_BYTES`. Nothing is fetched where only tokens are asked for (no ``context``), of
        which each medium is one, and where the queue has the request already.
        """
        try:
            given = content_of(url)
        except ValueError as error:
            raise GatewayError(400, f"a data: URL is not base64: {error}") from error
        if given is not None:
            return given
        get: _Get
        if self._read_file is not None and url.startswith(files.PREFIX):
            get, shown = partial(_read, self._read_file, url), url[:_SHOWN]
        else:
            target = self._target(url)
            get, shown = partial(_get, target, timeout_s), _shown(target)
        if context is None or context.is_replay:
            return url.encode()
        return await at_home(self._fetch(shown, get, context))

    async def _fetch(self, shown: str, get: _Get, context: RequestContext) -> bytes:
        own = self._fetching.setdefault(context.durable_id, _Fetching())
        client = context.tenant or context.client
        turn = self._turns.setdefault(client, asyncio.Semaphore(_OF_A_CLIENT))
        why = ""
        async with own.place(turn, self._room):
            try:
                async with asyncio.timeout_at(own.until):
                    for attempt in range(max(1, envs.VLLM_MEDIA_FETCH_MAX_RETRIES)):
                        if attempt:
                            await clock.pause(_PAUSE_S * 2 ** (attempt - 1))
                        async with own.few:
                            try:
                                return await get(context)
                            except _Passing as error:
                                why = str(error)
            except TimeoutError:
                why = f"all media of a request have {_ALL_S:g} s"
        raise GatewayError(502, f"{shown} could not be fetched: {why}")

    def _target(self, url: str) -> URL:
        """A URL as it is connected to; raises `GatewayError` where its domain is not listed."""
        try:
            target = URL(url)
            host, port = target.host or "", target.port
        except ValueError as error:
            raise GatewayError(400, f"{_begin(url)} is no URL: {error}") from error
        if ":" in host:
            host = f"[{host}]"
        domain = host if port == _PORTS.get(target.scheme) else f"{host}:{port}"
        if target.scheme not in _PORTS or domain not in self._allowed:
            raise GatewayError(
                400,
                f"{_begin(url)} is not fetched: give the content as a base64 data: URL"
                + (", or the URL of a domain that is allowed here" if self._allowed else ""),
            )
        if target.user is not None or target.password is not None:
            raise GatewayError(400, "a URL of media has no user and no password")
        return target


class _Fetching:
    """The fetches of one request, which share a place among those of all requests."""

    def __init__(self) -> None:
        self.few = asyncio.Semaphore(_OF_A_REQUEST)
        #: When they must have ended, by the loop's clock.
        self.until = 0.0
        self._lock = asyncio.Lock()
        self._count = 0
        self._held: AsyncExitStack | None = None

    @asynccontextmanager
    async def place(self, *turns: asyncio.Semaphore) -> AsyncIterator[None]:
        """Wait for a place, and leave it with the last of them.

        So what the first have brought is not held while others of the request wait for theirs.
        """
        self._count += 1
        try:
            async with self._lock:
                if self._held is None:
                    async with AsyncExitStack() as taken:
                        for turn in turns:
                            await taken.enter_async_context(turn)
                        self._held = taken.pop_all()
                    self.until = asyncio.get_running_loop().time() + _ALL_S
            yield
        finally:
            self._count -= 1
            if not self._count and self._held is not None:
                held, self._held = self._held, None
                await held.aclose()


def is_public(text: str) -> bool:
    """Whether an address is one of the public Internet, in no form one of a private network."""
    address = ip_address(text)
    if isinstance(address, IPv4Address):
        is_own = any(address in network for network in _OWN)
        return address.is_global and not address.is_multicast and not is_own
    if address in _NAT64:
        return is_public(str(IPv4Address(address.packed[-4:])))
    return address.is_global and address in _GLOBAL and address.sixtofour is None


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host; raises `GatewayError` where a name has one that is not public."""
    try:
        return [str(ip_address(host))]  # meant as it stands
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(place[0]) for *_, place in found]
    if not all(map(is_public, addresses)):
        raise GatewayError(400, f"{host} is not fetched from: its address is not public")
    return addresses


class _Network(httpcore.AnyIOBackend):
    """Connects to the very addresses that were looked at, and bounds what comes before a body."""

    def __init__(self) -> None:
        #: Bytes that may still come.
        self.left = _HEAD_BYTES

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises `GatewayError` where the host is not public."""
        fault: Exception = _Passing("it has no address")
        for address in await _addresses(host, port):
            try:
                stream = await super().connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except httpcore.ConnectError as error:
                fault = error
            else:
                return _Bounded(stream, self)
        raise fault


class _Bounded(httpcore.AsyncNetworkStream):
    """A connection of which only so much is read."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, network: _Network) -> None:
        self._stream = stream
        self._network = network

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        if not self._network.left:
            raise GatewayError(422, "a site of media has sent too much beside them")
        read = await self._stream.read(min(max_bytes, self._network.left), timeout)
        self._network.left -= len(read)
        return read

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        inner = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _Bounded(inner, self._network)


async def _read(read_file: FileReader, file_id: str, context: RequestContext) -> bytes:
    """Read a file, all of whose bytes count."""
    room = MAX_MEDIA_BYTES - context.fetched_bytes
    try:
        content = await asyncio.to_thread(read_file, context.tenant, file_id, room)
    except OSError as error:
        raise _Passing(type(error).__name__) from error
    _count(context, len(content))
    return content


def _count(context: RequestContext, size: int) -> None:
    context.fetched_bytes += size
    if context.fetched_bytes > MAX_MEDIA_BYTES:
        raise GatewayError(400, f"the media have more than {MAX_MEDIA_BYTES} bytes")


async def _get(target: URL, timeout_s: float, context: RequestContext) -> bytes:
    """One attempt, which takes at most ``timeout_s``.

    Nothing is unpacked, no redirect followed, and no proxy, cookie or password of the environment
    used: httpcore has none of that. Raises `_Passing` or `GatewayError`.
    """
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            await _receive(target, parts, context)
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError, TimeoutError) as error:
        context.fetched_bytes -= sum(map(len, parts))
        raise _Passing(type(error).__name__) from error  # its text has a site's bytes
    if sum(map(len, parts)) > LARGE:
        return await asyncio.to_thread(b"".join, parts)
    return b"".join(parts)


async def _receive(target: URL, parts: list[bytes], context: RequestContext) -> None:
    """Add what is there to ``parts``, which count."""
    network = _Network()
    # Not as text: nobody reads it in another way.
    url = httpcore.URL(
        scheme=target.scheme.encode(),
        host=(target.raw_host or "").encode(),
        port=target.port,
        target=target.raw_path_qs.encode(),
    )
    host = target.raw_authority.encode()
    headers = [(b"Host", host), (b"Accept", b"*/*"), (b"Accept-Encoding", b"identity")]
    async with (
        httpcore.AsyncConnectionPool(_ssl_context(), network_backend=network) as pool,
        pool.stream(b"GET", url, headers=headers) as answer,
    ):
        if answer.status in (408, 429) or answer.status >= 500:
            raise _Passing(f"HTTP {answer.status}")
        if answer.status != 200:
            more = "; redirects are not followed" if 300 <= answer.status < 400 else ""
            message = f"{_shown(target)} could not be fetched: HTTP {answer.status}{more}"
            raise GatewayError(422, message)
        coded = [value for name, value in answer.headers if name.lower() == b"content-encoding"]
        if any(value.lower() != b"identity" for value in coded):
            raise GatewayError(422, f"{_shown(target)} could not be fetched: it is compressed")
        network.left = 2 * MAX_MEDIA_BYTES  # with what stands between pieces
        async for part in answer.aiter_stream():
            parts.append(part)
            _count(context, len(part))
            if len(parts) > _MOST_PARTS:
                raise GatewayError(422, f"{_shown(target)} comes in too small pieces")


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    return httpcore.default_ssl_context()


def _begin(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _shown(target: URL) -> str:
    """A URL in a message, without its query, which may be a signature."""
    return _begin(f"{target.scheme}://{target.raw_authority}{target.raw_path}")
