"""Servers that may be elsewhere tomorrow: behind Sentinels, or a node of a Redis Cluster.

A yard lives on one node, so one ordinary connection is enough, if it asks where that node is
whenever it connects. redis-py's own cluster client would spread commands over all nodes, and
refuses some that a yard needs in one round trip (`TIME`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import redis
import redis.asyncio
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

Address = tuple[str, int]


class Elsewhere(redis.ConnectionError):
    """The server was asked, and is not the one (any more); it has done nothing."""


_ELSEWHERE: Final = (
    exceptions.AskError,
    exceptions.ClusterDownError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)


class AddressBook(Protocol):
    """Knows where a server is."""

    def find(self) -> Address:
        """Where to connect now; raises `redis.ConnectionError`."""

    def note(self, fault: redis.ResponseError) -> None:
        """A server has said that it is not the one."""


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Finds the master of a service; each Sentinel is asked until one knows."""

    service: str
    sentinels: Sequence[Address]
    #: How to connect to a Sentinel; what a connection takes.
    options: Mapping[str, Any]

    def find(self) -> Address:
        """The master, as the first Sentinel that answers names it."""
        said = []
        for address in self.sentinels:
            try:
                return self._ask(address)
            except redis.RedisError as fault:
                said.append(str(fault))
        raise redis.ConnectionError(f"no Sentinel names a master: {'; '.join(said)}")

    def _ask(self, address: Address) -> Address:
        with _briefly(address, self.options) as sentinel:
            found: Any = sentinel.sentinel_get_master_addr_by_name(self.service)
        if not found:
            raise redis.ConnectionError(f"{address[0]}:{address[1]} knows no {self.service!r}")
        host, port = found
        return host.decode() if isinstance(host, bytes) else host, int(port)

    def note(self, fault: redis.ResponseError) -> None:
        """Nothing to remember: the Sentinels are asked at each connection."""


class ClusterNodes:
    """Finds the node that holds a yard, by what a node says that does not (``MOVED``)."""

    def __init__(self, nodes: Sequence[Address], options: Mapping[str, Any]) -> None:
        self._nodes = nodes
        self._options = options
        self._holder: Address | None = None

    def find(self) -> Address:
        """The node that was said to hold the yard, or else any that answers.

        A node that hangs takes connections, too, so it is asked for an answer.
        """
        said = []
        for address in ([self._holder] if self._holder else []) + [*self._nodes]:
            try:
                with _briefly(address, self._options) as node:
                    node.ping()
            except (redis.AuthenticationError, redis.ResponseError):
                return address  # what is wrong here, the connection itself will say
            except redis.RedisError as fault:
                said.append(str(fault))
            else:
                return address
        raise redis.ConnectionError(f"no node of the cluster answers: {'; '.join(said)}")

    def note(self, fault: redis.ResponseError) -> None:
        """Remember whom a node has named; a yard has only one hash slot."""
        self._holder = fault.node_addr if isinstance(fault, exceptions.MovedError) else None


def _briefly(address: Address, options: Mapping[str, Any]) -> redis.Redis:
    """A connection for one question, which is asked once."""
    host, port = address
    once = {"host": host, "port": port, "retry": Retry(NoBackoff(), 0)}
    return redis.Redis.from_pool(redis.ConnectionPool(**{**options, **once}))


class _Searching(redis.Connection):
    """A connection that asks where its server is whenever it connects."""

    def __init__(self, *, book: AddressBook, **options: Any) -> None:
        self._book = book
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def _connect(self) -> socket.socket:
        self.host, self.port = self._book.find()
        found: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        return found

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as fault:
            if not _says_elsewhere(fault):
                raise
            self._book.note(fault)
            self.disconnect()  # type: ignore[no-untyped-call]
            raise Elsewhere(_moved(self.host, self.port, fault)) from fault


class _SearchingSSL(_Searching, redis.SSLConnection):
    """`_Searching` over TLS."""


class _AsyncSearching(redis.asyncio.Connection):
    """`_Searching` for asyncio."""

    def __init__(self, *, book: AddressBook, **options: Any) -> None:
        self._book = book
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._book.find)
        await super()._connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except redis.ResponseError as fault:
            if not _says_elsewhere(fault):
                raise
            self._book.note(fault)
            await self.disconnect()
            raise Elsewhere(_moved(self.host, self.port, fault)) from fault


class _AsyncSearchingSSL(_AsyncSearching, redis.asyncio.SSLConnection):
    """`_AsyncSearching` over TLS."""


def connection_class(*, tls: bool) -> type[redis.Connection]:
    """The kind of connection that takes an `AddressBook` as ``book``."""
    return _SearchingSSL if tls else _Searching


def async_connection_class(*, tls: bool) -> type[redis.asyncio.Connection]:
    """`connection_class` for asyncio."""
    return _AsyncSearchingSSL if tls else _AsyncSearching


def _says_elsewhere(fault: redis.ResponseError) -> bool:
    return isinstance(fault, _ELSEWHERE) or str(fault).startswith("UNBLOCKED")


def _moved(host: str, port: int, fault: redis.ResponseError) -> str:
    said = str(fault)
    if isinstance(fault, exceptions.MovedError):
        said = f"{fault.host}:{fault.port} does"
    return f"{host}:{port} does not serve this yard now: {said}"
