"""What the programs that serve HTTP share: their port, and uvicorn as they use it."""

from __future__ import annotations

import math
import os
import socket
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from tokenyard.process.http_connection import BoundedConnection, bounded
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.http_settings import HttpSettings


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


def exit_after(seconds: float, status: int) -> None:
    """End the process in any case: the interpreter would wait for a thread that waits."""
    last = threading.Timer(seconds, os._exit, (status,))
    last.daemon = True
    last.start()
