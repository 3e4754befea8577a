"""TLS to a broker, and what to do where only one side speaks it.

A server without TLS takes the greeting for the beginning of a command, and waits for the rest.
redis-py would wait as long as for the answer to a command, and then try again.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from typing import Any, Final

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.retry import Retry

#: The part of the time for connecting that a handshake may take; so it is known to be the cause.
_SHARE: Final = 0.8
_UNANSWERED: Final = "no answer to the TLS handshake"
#: What tells of a server without TLS: it answers nothing, or what is no TLS, in OpenSSL's words.
_NOT_TLS: Final = (_UNANSWERED, "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


class TlsUnanswered(exceptions.ConnectionError):
    """The server took the connection, but does not answer the TLS handshake."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"{_UNANSWERED} in {timeout_s:g} s")


class TlsConnection(redis.SSLConnection):
    """A connection over TLS whose handshake is bounded like connecting."""

    def _wrap_socket_with_ssl(self, sock: Any) -> ssl.SSLSocket:
        sock.settimeout(self.socket_connect_timeout)
        try:
            wrapped: ssl.SSLSocket = super()._wrap_socket_with_ssl(sock)  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise TlsUnanswered(self.socket_connect_timeout or math.inf) from error
        wrapped.settimeout(self.socket_timeout)
        return wrapped


class AsyncTlsConnection(redis.asyncio.SSLConnection):
    """`TlsConnection` for asyncio."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments: Mapping[str, Any] = super()._connection_arguments()
        return {**arguments, "ssl_handshake_timeout": self._patience_s}

    async def _connect(self) -> None:
        try:
            await super()._connect()  # type: ignore[no-untyped-call]
        except ConnectionAbortedError as error:  # that is how asyncio says it
            raise TlsUnanswered(self._patience_s) from error

    @property
    def _patience_s(self) -> float:
        return _SHARE * (self.socket_connect_timeout or math.inf)


class TlsRetry(Retry):
    """Retries, but not of a handshake without an answer."""

    def call_with_retry(
        self, do: Any, fail: Any, is_retryable: Any = None, with_failure_count: bool = False
    ) -> Any:
        """As redis-py's."""
        return super().call_with_retry(do, fail, is_retryable or _is_worth_it, with_failure_count)


class AsyncTlsRetry(AsyncRetry):
    """`TlsRetry` for asyncio."""

    async def call_with_retry(
        self, do: Any, fail: Any, is_retryable: Any = None, with_failure_count: bool = False
    ) -> Any:
        """As redis-py's."""
        return await super().call_with_retry(
            do, fail, is_retryable or _is_worth_it, with_failure_count
        )


def _is_worth_it(error: Exception) -> bool:
    # redis-py's asyncio wraps what it does not expect.
    return not any(isinstance(one, TlsUnanswered) for one in (error, error.__cause__))


def tls_hint(url: str, error: BaseException) -> str:
    """What to do about an error that TLS, or its absence, may have caused; else ""."""
    told = str(error)
    if url.startswith("rediss"):
        if any(word in told for word in _NOT_TLS):
            return ". Does this port speak TLS? If not, use redis://"
        if "CERTIFICATE_VERIFY_FAILED" in told:
            return " Name the file of its certificate authority: rediss://...?ssl_ca_certs=FILE"
    elif url.startswith("redis") and "Connection reset" in told:
        return ". If this port speaks TLS, use rediss://"
    return ""
