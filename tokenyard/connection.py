"""Connections to Redis: opened from a URL, always with time-outs, their errors translated.

`tokenyard.broker_url` says which URLs there are. Nothing outside this file needs to know what
redis-py raises: `translated` turns it into `tokenyard.errors`, at the edge.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from tokenyard.address import Elsewhere, async_connection_class, connection_class
from tokenyard.broker_url import public_url, read_url
from tokenyard.direct import DirectRedis
from tokenyard.errors import (
    BrokerUnavailable,
    BrokerUnsuitable,
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
    "translated",
]

AsyncRedis = redis.asyncio.Redis

#: A blocking read must end before the socket's time-out does, by so much: a server may stand still.
BLOCK_MARGIN_S: Final = 5.0
_RETRY_BASE_S: Final = 0.05
_RETRY_CAP_S: Final = 0.5
#: So often a command follows its yard at once; after that whoever gave it decides.
_HOPS: Final = 2
#: First words of errors that say: not now, but later. redis-py has no classes for them.
_PASSING: Final = ("MISCONF", "NOREPLICAS", "UNBLOCKED")


def _options(timeout_s: float, connect_timeout_s: float) -> dict[str, Any]:
    """Arguments that both kinds of connection share."""
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        # RESP3 brings nothing here (measured) and costs a longer handshake.
        "protocol": 2,
    }


def open_connection(
    url: str, *, timeout_s: float = 10.0, connect_timeout_s: float = 5.0, retries: int = 3
) -> redis.Redis:
    """A pool of connections that answers with bytes; it connects when first used.

    ``timeout_s`` bounds the wait for one answer: give blocking reads `BLOCK_MARGIN_S` more than
    they block. A command is repeated ``retries`` times when the connection breaks, so it must
    be idempotent, as all scripts are.
    """
    target = read_url(url, connect_timeout_s)
    options = _options(timeout_s, connect_timeout_s)
    retry = Retry(ExponentialWithJitterBackoff(_RETRY_CAP_S, _RETRY_BASE_S), retries)
    if target.book:
        # What was refused elsewhere may be repeated, whatever it is.
        retry = retry if retries else Retry(NoBackoff(), _HOPS, (Elsewhere,))
        kind = connection_class(tls=target.has_tls)
        options |= {"connection_class": kind, "book": target.book}
    try:
        return DirectRedis.from_url(target.url, retry=retry, **options)
    except ValueError as fault:
        raise SettingsError([f"redis URL {public_url(url)!r}: {fault}"]) from fault


def open_async_connection(
    url: str, *, timeout_s: float = 10.0, connect_timeout_s: float = 5.0, retries: int = 3
) -> AsyncRedis:
    """`open_connection` for asyncio."""
    target = read_url(url, connect_timeout_s)
    options = _options(timeout_s, connect_timeout_s)
    retry = AsyncRetry(ExponentialWithJitterBackoff(_RETRY_CAP_S, _RETRY_BASE_S), retries)
    if target.book:
        # What was refused elsewhere may be repeated, whatever it is.
        retry = retry if retries else AsyncRetry(NoBackoff(), _HOPS, (Elsewhere,))
        kind = async_connection_class(tls=target.has_tls)
        options |= {"connection_class": kind, "book": target.book}
    try:
        return redis.asyncio.Redis.from_url(target.url, retry=retry, **options)
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
        if isinstance(fault, redis.RedisError | OSError) and not isinstance(fault, TokenyardError):
            raise _our_error(fault, public_url(self._url)) from fault


def translated(url: str) -> AbstractContextManager[None]:
    """Turn what redis-py raises inside into `tokenyard.errors`; ``url`` goes into the message.

    Raises `BrokerUnavailable` where trying again helps, else `BrokerUnsuitable`.
    """
    return _Translation(url)


def _our_error(fault: redis.RedisError | OSError, shown: str) -> TokenyardError:
    match fault:
        case exceptions.AuthenticationError() | exceptions.AuthorizationError():
            return BrokerUnsuitable(f"Redis at {shown} refuses the user or password: {fault}")
        case exceptions.NoPermissionError():
            return NotPermitted(f"the user of Redis at {shown} lacks a permission: {fault}")
        case exceptions.ConnectionError() | exceptions.TimeoutError() | OSError():
            return BrokerUnavailable(f"Redis at {shown} does not answer: {fault}")
        case exceptions.OutOfMemoryError():
            return BrokerUnavailable(f"Redis at {shown} is full (maxmemory): {fault}")
        case exceptions.ReadOnlyError() | exceptions.TryAgainError():
            return BrokerUnavailable(f"Redis at {shown} takes no writes now: {fault}")
    if str(fault).startswith(_PASSING) or isinstance(fault, exceptions.ClusterDownError):
        return BrokerUnavailable(f"Redis at {shown} cannot serve now: {fault}")
    return BrokerUnsuitable(f"Redis at {shown} refuses: {fault}")
