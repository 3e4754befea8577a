"""What the programs that serve HTTP share: their port, and uvicorn with the bounds that it lacks.

Whoever sends a request byte by byte, or reads no answer, holds a connection and memory for a
bounded time only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.http_settings import HttpSettings

log = logging.getLogger("tokenyard.http")

#: Most bytes of a request's line and headers.
MAX_HEAD_BYTES: Final = 64 * 1024
#: A request may take a second longer for each of so many bytes.
BYTES_PER_S: Final = 16 * 1024
_REASONS: Final = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class BoundedConnection(HttpToolsProtocol):
    """See `bounded` for its settings."""

    receive_s: float
    send_s: float
    #: Of the answers that it gives itself.
    content_type: bytes = b"text/plain; charset=utf-8"
    #: As far as it has come; uvicorn sets it when a request begins.
    url: bytes = b""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._give_up_at = 0.0
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._head_bytes: int | None = 0  # None: the head is complete
        self._is_refused = False
        self._is_begun = False  # the app has the request whose body still comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect a request."""
        super().connection_made(transport)  # type: ignore[arg-type]  # as uvicorn has it
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._received()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        if self._is_refused:
            return
        if self._receiving is None and self._has_answered:
            self._expect()
        self._give_up_at += len(data) / BYTES_PER_S
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "the headers are too large")

    def on_headers_complete(self) -> None:
        """Start the request, if its head is not too large."""
        self._head_bytes = None
        if len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers) > MAX_HEAD_BYTES:
            self._refuse(431, "the headers are too large")
        else:
            super().on_headers_complete()
            self._is_begun = True

    def on_body(self, body: bytes) -> None:
        """Pass bytes of the body on."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._received()
        self._head_bytes = 0
        self._is_begun = False
        if not self._is_refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read: it may do so for a time."""
        super().pause_writing()
        self._sending = self.loop.call_later(self.send_s, self._cut_off)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    @property
    def _has_answered(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _expect(self) -> None:
        self._give_up_at = self.loop.time() + self.receive_s
        self._receiving = self.loop.call_later(self.receive_s, self._check_receiving)

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _check_receiving(self) -> None:
        left_s = self._give_up_at - self.loop.time()
        if left_s > 0:
            self._receiving = self.loop.call_later(left_s, self._check_receiving)
        elif self._head_bytes == 0:
            self.transport.close()  # it has asked nothing
        else:
            self._refuse(408, "the request came too slowly")

    def _refuse(self, status: int, message: str) -> None:
        self._is_refused = True
        self._received()
        is_answered = self._is_begun and self.cycle.response_started
        if not is_answered and (self._has_answered or not self.cycle.response_started):
            body = self.refusal(status, message)
            head = b"HTTP/1.1 %d %s\r\n" % (status, _REASONS[status])
            head += b"content-type: %s\r\n" % self.content_type
            head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(head + body)
        self.transport.close()

    def refusal(self, status: int, message: str) -> bytes:  # noqa: ARG002
        """The body of an answer that it gives itself."""
        return f"{message}\n".encode()

    def _cut_off(self) -> None:
        log.warning("cut off a client that has read nothing for %g s", self.send_s)
        self.transport.abort()


def bounded(settings: HttpSettings, kind: type[BoundedConnection]) -> type[BoundedConnection]:
    """A kind of connection with a program's settings."""
    own = {"receive_s": settings.receive_s, "send_s": settings.send_s}
    return type("Connection", (kind,), own)


def listen(settings: HttpSettings) -> socket.socket:
    """Open the port first: a port that is taken should not cost the time of an import.

    Raises `SettingsError`, also for a certificate that cannot be used.
    """
    _check_tls(settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol's number: only then asyncio turns off Nagle's algorithm, which would hold
    # back the second write of an answer for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        place = f"{settings.host}:{settings.port}"
        raise SettingsError([f"port: cannot listen on {place}: {error.strerror}"]) from error
    return listener


def _check_tls(settings: HttpSettings) -> None:
    if settings.tls_cert is None or settings.tls_key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        fault = f"tls_cert, tls_key: no certificate and its key in PEM ({error.strerror})"
        raise SettingsError([fault]) from error


def address(settings: HttpSettings, listener: socket.socket) -> str:
    """Its URL, with the port that it has got."""
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{settings.own_name}:{listener.getsockname()[1]}"


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the program."""
        yield


class HttpServer(QuietServer):
    """uvicorn with our bounds."""

    def __init__(self, app: ASGIApp, settings: HttpSettings, kind: type[BoundedConnection]) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            http=bounded(settings, kind),
            ws="none",
            timeout_keep_alive=math.ceil(settings.idle_s),
            limit_concurrency=settings.max_connections,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        super().__init__(config)

    def cut(self) -> None:
        """Close all connections once what was written is sent; no stream is completed."""
        for connection in list(self.server_state.connections):
            cast("BoundedConnection", connection).transport.close()


def exit_after(seconds: float) -> None:
    """End the process in any case: the interpreter would wait for a thread that waits."""
    last = threading.Timer(seconds, os._exit, (0,))
    last.daemon = True
    last.start()
