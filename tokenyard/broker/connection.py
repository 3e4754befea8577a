"""Connections to Redis: opened from a URL, always with time-outs, their errors translated.

`tokenyard.broker.url` describes the URLs. `translated` turns the errors of redis-py into those of
`tokenyard.protocol.errors`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple, TypedDict, Unpack

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from tokenyard.broker.direct import DirectRedis
from tokenyard.broker.discovery import (
    AsyncLocatingConnection,
    AsyncLocatingTlsConnection,
    LocatingConnection,
    LocatingTlsConnection,
    ServerMoved,
)
from tokenyard.broker.pools import (
    DEFAULT_MAX_CONNECTIONS,
    DEFAULT_POOL_TIMEOUT_S,
    AsyncWaitingPool,
    WaitingPool,
)
from tokenyard.broker.tls import (
    AsyncTlsConnection,
    AsyncTlsRetry,
    TlsConnection,
    TlsRetry,
    tls_hint,
)
from tokenyard.broker.url import batch_url, named_url, public_url, read_url
from tokenyard.protocol import errors
from tokenyard.protocol.keys import Yard

AsyncRedis = redis.asyncio.Redis

#: The socket's time-out exceeds a blocking read by this much, since a server may pause.
BLOCK_MARGIN_S: Final = 5.0
_RETRY_BASE_S: Final = 0.05
_RETRY_CAP_S: Final = 0.5
#: How often a command follows its yard to another server before it fails.
_HOPS: Final = 2
#: Why a server refuses all writes, by the first word of its error, and what to do.
_NO_WRITES: Final[Mapping[str, str]] = {
    "OOM": (
        "is full (maxmemory) and refuses new requests; what runs still finishes and frees memory."
        " Raise maxmemory, or lower max_num_queued_reqs or the clients' result_ttl"
    ),
    "MISCONF": (
        "cannot write to its disk and refuses all writes. Make room on its disk, and check the"
        " server's log"
    ),
    "READONLY": (
        "is a read-only replica. Give the URL of its master, or one with Sentinels"
        " (redis+sentinel://)"
    ),
    "NOREPLICAS": (
        "refuses all writes, because fewer replicas follow than min-replicas-to-write asks for."
        " Check the replicas"
    ),
}
#: Errors that pass by themselves.
_PASSING: Final = (exceptions.ClusterDownError, exceptions.TryAgainError)
#: And their codes where redis-py has no class: a script of somebody else runs for long.
_PASSING_CODES: Final = ("BUSY", "UNBLOCKED")
#: What redis-py may raise; UnicodeError for an id or a host name that is not Unicode.
_FOREIGN: Final = (redis.RedisError, OSError, UnicodeError)


class _Kind(NamedTuple):
    """The classes of connections of one kind; those for TLS and for servers that move are ours."""

    pool: Any
    retry: Any
    tls_retry: Any
    tls: Any
    locating: Any
    locating_tls: Any


_SYNC: Final = _Kind(
    WaitingPool, Retry, TlsRetry, TlsConnection, LocatingConnection, LocatingTlsConnection
)
_ASYNC: Final = _Kind(
    AsyncWaitingPool,
    AsyncRetry,
    AsyncTlsRetry,
    AsyncTlsConnection,
    AsyncLocatingConnection,
    AsyncLocatingTlsConnection,
)


class ConnectionOptions(TypedDict, total=False):
    """The bounds of `open_connection`."""

    timeout_s: float
    connect_timeout_s: float
    retries: int
    max_connections: int
    pool_timeout_s: float


def open_connection(url: str, **options: Unpack[ConnectionOptions]) -> redis.Redis:
    """A pool of connections that answers with bytes; it connects when first used.

    ``timeout_s`` bounds the wait for one answer: give blocking reads `BLOCK_MARGIN_S` more than
    they block. A command is repeated ``retries`` times when the connection breaks, so it must
    be idempotent, as all scripts are.

    At most ``max_connections`` are open at once. A command that needs one more waits at most
    ``pool_timeout_s`` for it, then raises `redis.exceptions.MaxConnectionsError`. The options
    ``max_connections`` and ``timeout`` of a URL override these two.
    """
    return DirectRedis.from_pool(_open_pool(_SYNC, url, **options))


def open_async_connection(url: str, **options: Unpack[ConnectionOptions]) -> AsyncRedis:
    """`open_connection` for asyncio."""
    return redis.asyncio.Redis.from_pool(_open_pool(_ASYNC, url, **options))


def _open_pool(
    kind: _Kind,
    url: str,
    *,
    timeout_s: float = 10.0,
    connect_timeout_s: float = 5.0,
    retries: int = 3,
    max_connections: int = DEFAULT_MAX_CONNECTIONS,
    pool_timeout_s: float = DEFAULT_POOL_TIMEOUT_S,
) -> Any:
    target = read_url(url, connect_timeout_s)
    backoff = ExponentialWithJitterBackoff(_RETRY_CAP_S, _RETRY_BASE_S)
    retry = (kind.tls_retry if target.has_tls else kind.retry)(backoff, retries)
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": pool_timeout_s,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        # RESP3 brings nothing here (measured) and costs a longer handshake.
        "protocol": 2,
    }
    if target.book:
        # A command that another server refused can always be repeated.
        retry = retry if retries else kind.retry(NoBackoff(), _HOPS, (ServerMoved,))
        options["connection_class"] = kind.locating_tls if target.has_tls else kind.locating
        options["book"] = target.book
    elif target.has_tls:
        options["connection_class"] = kind.tls
    try:
        return kind.pool.from_url(target.url, retry=retry, **options)
    except ValueError as error:
        raise errors.SettingsError([f"redis URL {public_url(url)!r}: {error}"]) from error


@contextmanager
def connected(url: str, *, timeout_s: float = 10.0, retries: int = 3) -> Iterator[redis.Redis]:
    """A connection for the length of a block, whose errors are `translated`."""
    with translated(url), open_connection(url, timeout_s=timeout_s, retries=retries) as connection:
        yield connection


def batch_connection(yard: Yard) -> redis.Redis:
    """The connection to the Redis that has batch jobs: the yard's, where it is the same.

    Raises `SettingsError`, see `batch_url`.
    """
    where = batch_url(yard.url)
    return yard.connection if where == yard.url else _batch_connection(where)


@functools.cache
def _batch_connection(url: str) -> redis.Redis:
    return open_connection(url, connect_timeout_s=2.0, retries=1)


class _Translation:
    """The context manager of `translated`; a generator takes twice as long for each command."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # `WaitTimeout` is an OSError, too.
        if isinstance(error, _FOREIGN) and not isinstance(error, errors.TokenyardError):
            raise our_error(error, self._url) from error
        # uvloop's, of a connection that was closed while redis-py wrote to it.
        if isinstance(error, RuntimeError) and "the handler is closed" in str(error):
            raise our_error(exceptions.ConnectionError("it closes"), self._url) from error


def translated(url: str) -> AbstractContextManager[None]:
    """Turn what redis-py raises into `tokenyard.protocol.errors`; messages name ``url``.

    Raises `BrokerUnavailable` where trying again helps (`BrokerNotWritable` where it answers and
    takes no writes), else `BrokerUnsuitable`.
    """
    return _Translation(url)


def our_error(error: redis.RedisError | OSError | UnicodeError, url: str) -> errors.TokenyardError:
    """Our error for one of redis-py; its message has URL and user but no password."""
    shown = named_url(url)
    match error:
        case exceptions.MaxConnectionsError():
            return errors.BrokerUnavailable(f"no connection to Redis at {shown} was free: {error}")
        case UnicodeEncodeError(encoding="utf-8"):
            return errors.InvalidRequest("text", f"is no valid Unicode: {error}")
        case UnicodeError():
            return errors.SettingsError(
                [f"redis URL {shown!r}: its host cannot be a name: {error}"]
            )
        case exceptions.AuthenticationError() | exceptions.AuthorizationError():
            return errors.BrokerUnsuitable(
                f"Redis at {shown} refuses the user or password: {error}"
            )
        case exceptions.NoPermissionError():
            return errors.NotPermitted(f"the user of Redis at {shown} lacks a permission: {error}")
        case exceptions.BusyLoadingError():
            return errors.BrokerUnavailable(
                f"Redis at {shown} is still loading its data; try again soon"
            )
        case exceptions.MasterDownError():
            return errors.BrokerUnavailable(
                f"Redis at {shown} is a replica that has lost its master, and answers nothing."
                " Give the URL of its master, or one with Sentinels (redis+sentinel://)"
            )
        case exceptions.ConnectionError() | exceptions.TimeoutError() | OSError():
            hint = tls_hint(url, error)
            return errors.BrokerUnavailable(f"Redis at {shown} does not answer: {error}{hint}")
    code, what = refused_write(error)
    if code:
        return errors.BrokerNotWritable(f"Redis at {shown} {what}", code)
    if isinstance(error, _PASSING) or str(error).partition(" ")[0] in _PASSING_CODES:
        return errors.BrokerUnavailable(f"Redis at {shown} cannot serve now: {error}")
    return errors.BrokerUnsuitable(f"Redis at {shown} refuses: {error}")


def refused_write(error: Exception) -> tuple[str, str]:
    """Redis' code for refusing all writes, and an explanation; empty for any other error."""
    match error:
        case exceptions.OutOfMemoryError():
            code = "OOM"
        case exceptions.ReadOnlyError():
            code = "READONLY"
        case _:
            code = str(error).partition(" ")[0]
    what = _NO_WRITES.get(code, "")
    return (code, f"{what} ({code})") if what else ("", "")
