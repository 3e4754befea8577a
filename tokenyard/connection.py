"""Connections to Redis: opened from a URL, always with time-outs, their errors translated.

URLs are ``redis://``, ``rediss://`` (TLS) and ``unix://``. Nothing outside this file needs to
know what redis-py raises: `translated` turns it into `tokenyard.errors`, at the edge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from tokenyard.errors import BrokerUnavailable, BrokerUnsuitable, SettingsError, TokenyardError

AsyncRedis = redis.asyncio.Redis

SCHEMES: Final = ("redis", "rediss", "unix")
#: A blocking read must end before the socket's time-out does: leave at least so much between.
BLOCK_MARGIN_S: Final = 5.0
_RETRY_BASE_S: Final = 0.05
_RETRY_CAP_S: Final = 0.5
_PASSWORD_IN_QUERY: Final = re.compile(r"(^|&)password=[^&]*", re.IGNORECASE)


def public_url(url: str) -> str:
    """The URL without user name and password, fit for logs and messages."""
    parts = urlsplit(url)
    query = _PASSWORD_IN_QUERY.sub("", parts.query).lstrip("&")
    netloc = parts.netloc.rpartition("@")[2]
    shown = urlunsplit((parts.scheme, netloc, parts.path, query, ""))
    # urlunsplit leaves out an empty host where the path does not ask for it.
    return shown if "://" in shown else shown.replace(":", "://", 1)


def _options(url: str, timeout_s: float, connect_timeout_s: float) -> dict[str, Any]:
    """Arguments that both kinds of connection share; raises `SettingsError` for a bad URL."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise SettingsError([f"redis URL {public_url(url)!r}: use redis://, rediss:// or unix://"])
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
    options = _options(url, timeout_s, connect_timeout_s)
    retry = Retry(ExponentialWithJitterBackoff(_RETRY_CAP_S, _RETRY_BASE_S), retries)
    try:
        return redis.Redis.from_url(url, retry=retry, **options)
    except ValueError as fault:
        raise SettingsError([f"redis URL {public_url(url)!r}: {fault}"]) from fault


def open_async_connection(
    url: str, *, timeout_s: float = 10.0, connect_timeout_s: float = 5.0, retries: int = 3
) -> AsyncRedis:
    """`open_connection` for asyncio."""
    options = _options(url, timeout_s, connect_timeout_s)
    retry = AsyncRetry(ExponentialWithJitterBackoff(_RETRY_CAP_S, _RETRY_BASE_S), retries)
    try:
        return redis.asyncio.Redis.from_url(url, retry=retry, **options)
    except ValueError as fault:
        raise SettingsError([f"redis URL {public_url(url)!r}: {fault}"]) from fault


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn what redis-py raises inside into `tokenyard.errors`; ``url`` goes into the message.

    Raises `BrokerUnavailable` where trying again helps, else `BrokerUnsuitable`.
    """
    shown = public_url(url)
    try:
        yield
    except TokenyardError:
        raise  # ours already; `WaitTimeout` is an OSError, too
    except (exceptions.AuthenticationError, exceptions.AuthorizationError) as fault:
        raise BrokerUnsuitable(f"Redis at {shown} refuses the user or password: {fault}") from fault
    except exceptions.NoPermissionError as fault:
        raise BrokerUnsuitable(f"Redis at {shown} lacks a permission: {fault}") from fault
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as fault:
        raise BrokerUnavailable(f"Redis at {shown} does not answer: {fault}") from fault
    except exceptions.OutOfMemoryError as fault:
        raise BrokerUnavailable(f"Redis at {shown} is full (maxmemory): {fault}") from fault
    except (exceptions.ReadOnlyError, exceptions.TryAgainError) as fault:
        raise BrokerUnavailable(f"Redis at {shown} takes no writes now: {fault}") from fault
    except exceptions.RedisError as fault:
        raise BrokerUnsuitable(f"Redis at {shown} refuses: {fault}") from fault
