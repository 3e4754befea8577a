"""Servers that may move: behind Sentinels, or a node of a Redis Cluster.

A yard lives on one node, so an ordinary connection is enough, if it looks up that node whenever it
connects. redis-py's cluster client spreads commands over all nodes, and refuses some that a yard
needs in one round trip (`TIME`); its `Sentinel.master_for` has a pool of its own, which does not
wait for a free connection as those of `tokenyard.broker.pools` do.
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

from tokenyard.broker.tls import AsyncTlsConnection, TlsConnection

Address = tuple[str, int]


class ServerMoved(redis.ConnectionError):
    """The server does not hold the yard (any more), and has not run the command."""


_MOVED: Final = (
    exceptions.AskError,
    exceptions.ClusterDownError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)


class AddressBook(Protocol):
    """Finds the address of a server."""

    def find(self) -> Address:
        """The address to connect to; raises `redis.ConnectionError`."""

    def note(self, error: redis.ResponseError) -> None:
        """Note that a server does not hold the yard."""


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Finds the master of a service: asks one Sentinel after the other."""

    service: str
    sentinels: Sequence[Address]
    #: Options of the connections to Sentinels.
    options: Mapping[str, Any]

    def find(self) -> Address:
        """The master, from the first Sentinel that knows it."""
        failures = []
        for address in self.sentinels:
            try:
                return self._ask(address)
            except redis.RedisError as error:
                failures.append(str(error))
        raise redis.ConnectionError(f"no Sentinel names a master: {'; '.join(failures)}")

    def _ask(self, address: Address) -> Address:
        with _briefly(address, self.options) as sentinel:
            found: Any = sentinel.sentinel_get_master_addr_by_name(self.service)
        if not found:
            raise redis.ConnectionError(f"{address[0]}:{address[1]} knows no {self.service!r}")
        host, port = found
        return host.decode() if isinstance(host, bytes) else host, int(port)

    def note(self, error: redis.ResponseError) -> None:
        """Nothing to note: the Sentinels are asked at each connection."""


class ClusterNodes:
    """Finds the node that holds a yard, from the ``MOVED`` answers of other nodes."""

    def __init__(self, nodes: Sequence[Address], options: Mapping[str, Any]) -> None:
        self._nodes = nodes
        self._options = options
        self._holder: Address | None = None

    def find(self) -> Address:
        """The node that is known to hold the yard, or else any that answers.

        A node that hangs accepts connections, too, so each is pinged.
        """
        failures = []
        for address in ([self._holder] if self._holder else []) + [*self._nodes]:
            try:
                with _briefly(address, self._options) as node:
                    node.ping()
            except (redis.AuthenticationError, redis.ResponseError):
                return address  # the connection itself reports the error
            except redis.RedisError as error:
                failures.append(str(error))
            else:
                return address
        raise redis.ConnectionError(f"no node of the cluster answers: {'; '.join(failures)}")

    def note(self, error: redis.ResponseError) -> None:
        """Remember the node that another has named; a yard has only one hash slot."""
        self._holder = error.node_addr if isinstance(error, exceptions.MovedError) else None


def _briefly(address: Address, options: Mapping[str, Any]) -> redis.Redis:
    """A connection for one command, without retries."""
    host, port = address
    once = {"host": host, "port": port, "retry": Retry(NoBackoff(), 0)}
    return redis.Redis.from_pool(redis.ConnectionPool(**{**options, **once}))


class LocatingConnection(redis.Connection):
    """A connection that looks up its server whenever it connects."""

    def __init__(self, *, book: AddressBook, **options: Any) -> None:
        self._book = book
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def _connect(self) -> socket.socket:
        self.host, self.port = self._book.find()
        found: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        return found

    def read_response(self, *args: Any, **options: Any) -> Any:
        """As redis-py's; raises `ServerMoved` where the server does not hold the yard."""
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as error:
            moved = _moved(self, self._book, error)
            self.disconnect()  # type: ignore[no-untyped-call]
            raise moved from error


class LocatingTlsConnection(LocatingConnection, TlsConnection):
    """`LocatingConnection` over TLS."""


class AsyncLocatingConnection(redis.asyncio.Connection):
    """`LocatingConnection` for asyncio."""

    def __init__(self, *, book: AddressBook, **options: Any) -> None:
        self._book = book
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._book.find)
        await super()._connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """See `LocatingConnection`."""
        try:
            return await super().read_response(*args, **options)
        except redis.ResponseError as error:
            moved = _moved(self, self._book, error)
            await self.disconnect()
            raise moved from error


class AsyncLocatingTlsConnection(AsyncLocatingConnection, AsyncTlsConnection):
    """`AsyncLocatingConnection` over TLS."""


def _moved(
    at: redis.Connection | redis.asyncio.Connection, book: AddressBook, error: redis.ResponseError
) -> ServerMoved:
    """What to raise where the server does not hold the yard; any other error is raised again."""
    reason = str(error)
    if not isinstance(error, _MOVED) and not reason.startswith("UNBLOCKED"):
        raise error
    book.note(error)
    if isinstance(error, exceptions.MovedError):
        reason = f"{error.host}:{error.port} does"
    return ServerMoved(f"{at.host}:{at.port} does not serve this yard now: {reason}")
