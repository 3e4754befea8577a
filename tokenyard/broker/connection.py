"""Connections to Redis: opened from a URL, always with time-outs, their errors translated.

`tokenyard.broker.url` says which URLs there are. Nothing outside this file needs to know what
redis-py raises: `translated` turns it into `tokenyard.protocol.errors`, at the edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from tokenyard.broker.direct import DirectRedis
from tokenyard.broker.discovery import Elsewhere, async_connection_class, connection_class
from tokenyard.broker.pools import (
    DEFAULT_MAX_CONNECTIONS,
    DEFAULT_POOL_TIMEOUT_S,
    AsyncWaitingPool,
    WaitingPool,
)
from tokenyard.broker.url import named_url, public_url, read_url
from tokenyard.protocol.errors import (
    BrokerNotWritable,
    BrokerUnavailable,
    BrokerUnsuitable,
    InvalidRequest,
    NotPermitted,
    SettingsError,
    TokenyardError,
)

__all__ = [
    "BLOCK_MARGIN_S",
    "AsyncRedis",
    "open_async_connection",
    "open_connection",
    "public_url",
    "refused_write",
    "translated",
]

AsyncRedis = redis.asyncio.Redis

#: A blocking read must end before the socket's time-out does, by so much: a server may stand still.
BLOCK_MARGIN_S: Final = 5.0
_RETRY_BASE_S: Final = 0.05
_RETRY_CAP_S: Final = 0.5
#: So often a command follows its yard at once; after that whoever gave it decides.
_HOPS: Final = 2
#: What a server is that refuses all writes, by the first word of its error, and what to do.
_NO_WRITES: Final[Mapping[str, str]] = {
    "OOM": (
        "is full (maxmemory) and refuses new requests; what runs still finishes and frees memory."
        " Raise maxmemory, or lower max_num_queued_reqs or the clients' result_ttl"
    ),
    "MISCONF": (
        "cannot write to its disk and refuses all writes. Make room on its disk, and look into the"
        " server's log"
    ),
    "READONLY": (
        "is a read-only replica. Give the URL of its master, or one with Sentinels"
        " (redis+sentinel://)"
    ),
    "NOREPLICAS": (
        "refuses all writes, because fewer replicas follow than min-replicas-to-write asks for."
        " Look after the replicas"
    ),
}
#: What passes, in redis-py's classes and else by the first word.
_PASSING: Final = (exceptions.ClusterDownError, exceptions.TryAgainError)
#: What may come out of redis-py and what it uses; an id or the name of a host may be no text.
_FOREIGN: Final = (redis.RedisError, OSError, UnicodeError)


def _options(
    timeout_s: float, connect_timeout_s: float, max_connections: int, pool_timeout_s: float
) -> dict[str, Any]:
    """Arguments that both kinds of connection share."""
    return {
        "max_connections": max_connections,
        "timeout": pool_timeout_s,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        # RESP3 brings nothing here (measured) and costs a longer handshake.
        "protocol": 2,
    }


def open_connection(
    url: str,
    *,
    timeout_s: float = 10.0,
    connect_timeout_s: float = 5.0,
    retries: int = 3,
    max_connections: int = DEFAULT_MAX_CONNECTIONS,
    pool_timeout_s: float = DEFAULT_POOL_TIMEOUT_S,
) -> redis.Redis:
    """A pool of connections that answers with bytes; it connects when first used.

    ``timeout_s`` bounds the wait for one answer: give blocking reads `BLOCK_MARGIN_S` more than
    they block. A command is repeated ``retries`` times when the connection breaks, so it must
    be idempotent, as all scripts are.

    At most ``max_connections`` are open at once. A command that needs one more waits at most
    ``pool_timeout_s`` for it, then raises `redis.exceptions.MaxConnectionsError`. The options
    ``max_connections`` and ``timeout`` of a URL override these two.
    """
    target = read_url(url, connect_timeout_s)
    options = _options(timeout_s, connect_timeout_s, max_connections, pool_timeout_s)
    retry = Retry(ExponentialWithJitterBackoff(_RETRY_CAP_S, _RETRY_BASE_S), retries)
    if target.book:
        # What was refused elsewhere may be repeated, whatever it is.
        retry = retry if retries else Retry(NoBackoff(), _HOPS, (Elsewhere,))
        kind = connection_class(tls=target.has_tls)
        options |= {"connection_class": kind, "book": target.book}
    try:
        return DirectRedis.from_pool(WaitingPool.from_url(target.url, retry=retry, **options))
    except ValueError as fault:
        raise SettingsError([f"redis URL {public_url(url)!r}: {fault}"]) from fault


def open_async_connection(
    url: str,
    *,
    timeout_s: float = 10.0,
    connect_timeout_s: float = 5.0,
    retries: int = 3,
    max_connections: int = DEFAULT_MAX_CONNECTIONS,
    pool_timeout_s: float = DEFAULT_POOL_TIMEOUT_S,
) -> AsyncRedis:
    """`open_connection` for asyncio."""
    target = read_url(url, connect_timeout_s)
    options = _options(timeout_s, connect_timeout_s, max_connections, pool_timeout_s)
    retry = AsyncRetry(ExponentialWithJitterBackoff(_RETRY_CAP_S, _RETRY_BASE_S), retries)
    if target.book:
        # What was refused elsewhere may be repeated, whatever it is.
        retry = retry if retries else AsyncRetry(NoBackoff(), _HOPS, (Elsewhere,))
        kind = async_connection_class(tls=target.has_tls)
        options |= {"connection_class": kind, "book": target.book}
    try:
        pool = AsyncWaitingPool.from_url(target.url, retry=retry, **options)
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as fault:
        raise SettingsError([f"redis URL {public_url(url)!r}: {fault}"]) from fault


class _Translation:
    """What `translated` gives; a generator would take twice as long for each command."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, fault: BaseException | None, __: object) -> None:
        # What is ours already stays; `WaitTimeout` is an OSError, too.
        if isinstance(fault, _FOREIGN) and not isinstance(fault, TokenyardError):
            raise our_error(fault, self._url) from fault


def translated(url: str) -> AbstractContextManager[None]:
    """Turn what redis-py raises into `tokenyard.protocol.errors`; messages name ``url``.

    Raises `BrokerUnavailable` where trying again helps (`BrokerNotWritable` where it answers and
    takes no writes), else `BrokerUnsuitable`.
    """
    return _Translation(url)


def our_error(fault: redis.RedisError | OSError | UnicodeError, url: str) -> TokenyardError:
    """The error of ours that stands for one of redis-py, with URL and user but no password."""
    shown = named_url(url)
    match fault:
        case exceptions.MaxConnectionsError():
            return BrokerUnavailable(f"no connection to Redis at {shown} was free: {fault}")
        case UnicodeEncodeError(encoding="utf-8"):
            return InvalidRequest("text", f"is no valid Unicode: {fault}")
        case UnicodeError():
            return SettingsError([f"redis URL {shown!r}: its host cannot be a name: {fault}"])
        case exceptions.AuthenticationError() | exceptions.AuthorizationError():
            return BrokerUnsuitable(f"Redis at {shown} refuses the user or password: {fault}")
        case exceptions.NoPermissionError():
            return NotPermitted(f"the user of Redis at {shown} lacks a permission: {fault}")
        case exceptions.BusyLoadingError():
            return BrokerUnavailable(f"Redis at {shown} is still loading its data; try again soon")
        case exceptions.MasterDownError():
            return BrokerUnavailable(
                f"Redis at {shown} is a replica that has lost its master, and answers nothing."
                " Give the URL of its master, or one with Sentinels (redis+sentinel://)"
            )
        case exceptions.ConnectionError() | exceptions.TimeoutError() | OSError():
            return BrokerUnavailable(f"Redis at {shown} does not answer: {fault}")
    code, what = refused_write(fault)
    if code:
        return BrokerNotWritable(f"Redis at {shown} {what}", code)
    if isinstance(fault, _PASSING) or str(fault).startswith("UNBLOCKED"):
        return BrokerUnavailable(f"Redis at {shown} cannot serve now: {fault}")
    return BrokerUnsuitable(f"Redis at {shown} refuses: {fault}")


def refused_write(fault: Exception) -> tuple[str, str]:
    """Redis' word for why it takes no writes, and what it is then, with what to do; else empty."""
    match fault:
        case exceptions.OutOfMemoryError():
            code = "OOM"
        case exceptions.ReadOnlyError():
            code = "READONLY"
        case _:
            code = str(fault).partition(" ")[0]
    what = _NO_WRITES.get(code, "")
    return (code, f"{what} ({code})") if what else ("", "")
