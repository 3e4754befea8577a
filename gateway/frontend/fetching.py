"""Fetches media: files of the tenant, and what is at domains that the operator has listed.

A request names the URL, so all that follows from it is hostile: a name may lead to an address of
the operator's own network, an answer to another place, and a few bytes may unpack to gigabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from ipaddress import IPv4Address, IPv6Network, ip_address
from typing import Any, Final
from weakref import WeakValueDictionary

import aiohttp
from aiohttp.abc import ResolveResult
from vllm import envs
from yarl import URL

from gateway.frontend.side import at_home
from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError
from tokenyard import clock
from tokenyard.protocol.media import MAX_MEDIA_BYTES, content_of

#: Fetches of a process at a time, and of one client; each holds up to `MAX_MEDIA_BYTES`.
_AT_ONCE: Final = 16
_OF_A_CLIENT: Final = 4
#: Before the second attempt; twice as long before the third, and so on.
_PAUSE_S: Final = 1.0
_PIECE: Final = 64 * 1024
#: How the id of an uploaded file begins.
FILE_PREFIX: Final = "file-"
_SHOWN: Final = 100  # characters of a URL
#: The bound of vLLM's server on an attempt to fetch a sound.
AUDIO_TIMEOUT_S: Final = envs.VLLM_AUDIO_FETCH_TIMEOUT
#: Of IPv6: what is assigned for the world, and where a network has its IPv4 addresses.
_GLOBAL: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")


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
        if self._read_file is not None and url.startswith(FILE_PREFIX):
            get = partial(_read, self._read_file, url)
        else:
            get = partial(_get, self._target(url), timeout_s)
        if context is None or context.is_replay:
            return url.encode()
        return await at_home(self._fetch(url, get, context))

    async def _fetch(self, url: str, get: _Get, context: RequestContext) -> bytes:
        client = context.tenant or context.client
        turn = self._turns.setdefault(client, asyncio.Semaphore(_OF_A_CLIENT))
        for attempt in range(max(1, envs.VLLM_MEDIA_FETCH_MAX_RETRIES)):
            if attempt:
                await clock.pause(_PAUSE_S * 2 ** (attempt - 1))
            async with turn, self._room:
                try:
                    return await get(context)
                except (_Passing, aiohttp.ClientError, TimeoutError, OSError) as error:
                    why = f"{error}" or type(error).__name__
        raise GatewayError(502, f"{_shown(url)} could not be fetched: {why}")

    def _target(self, url: str) -> URL:
        """A URL as it is connected to; raises `GatewayError` where its domain is not listed."""
        try:
            target = URL(url)
        except ValueError as error:
            raise GatewayError(400, f"{_shown(url)} is no URL: {error}") from error
        if target.scheme not in ("http", "https") or target.host not in self._allowed:
            raise GatewayError(
                400,
                f"{_shown(url)} is not fetched: give the content as a base64 data: URL"
                + (", or the URL of a domain that is allowed here" if self._allowed else ""),
            )
        return target


class _PublicResolver(aiohttp.ThreadedResolver):
    """Finds the addresses of a listed name: the very ones that are connected to."""

    async def resolve(self, host: str, *args: Any, **options: Any) -> list[ResolveResult]:
        """Raises `GatewayError` where one of them is in a private network."""
        found = await super().resolve(host, *args, **options)
        if not all(is_public(one["host"]) for one in found):
            raise GatewayError(400, f"{host} is not fetched from: its address is not public")
        return found


def is_public(text: str) -> bool:
    """Whether an address is one of the public Internet, in no form one of a private network."""
    address = ip_address(text)
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    if address in _NAT64:
        return is_public(str(IPv4Address(address.packed[-4:])))
    return address.is_global and address in _GLOBAL and address.sixtofour is None


async def _read(read_file: FileReader, file_id: str, context: RequestContext) -> bytes:
    """Read a file, all of whose bytes count."""
    room = MAX_MEDIA_BYTES - context.fetched_bytes
    content = await asyncio.to_thread(read_file, context.tenant, file_id, room)
    context.fetched_bytes += len(content)
    return content


async def _get(target: URL, timeout_s: float, context: RequestContext) -> bytes:
    """One attempt, which takes at most ``timeout_s``.

    Nothing is unpacked, no redirect followed, and no proxy, cookie or password of the environment
    used.
    """
    connector = aiohttp.TCPConnector(resolver=_PublicResolver(), force_close=True)
    async with (
        aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        ) as session,
        session.get(target, allow_redirects=False) as answer,
    ):
        if answer.status in (408, 429) or answer.status >= 500:
            raise _Passing(f"HTTP {answer.status}")
        if answer.status != 200:
            more = "; redirects are not followed" if 300 <= answer.status < 400 else ""
            raise GatewayError(
                422, f"{_shown(target)} could not be fetched: HTTP {answer.status}{more}"
            )
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise GatewayError(422, f"{_shown(target)} could not be fetched: it is compressed")
        parts: list[bytes] = []
        try:
            async for part in answer.content.iter_chunked(_PIECE):
                context.fetched_bytes += len(part)
                parts.append(part)
                if context.fetched_bytes > MAX_MEDIA_BYTES:
                    raise GatewayError(400, f"the media have more than {MAX_MEDIA_BYTES} bytes")
        except BaseException:
            context.fetched_bytes -= sum(map(len, parts))
            raise
        return b"".join(parts)


def _shown(url: URL | str) -> str:
    """A URL in a message, which has at most its beginning."""
    text = str(url)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
