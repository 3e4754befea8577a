"""A client of server-sent events over a bare socket, which can be cut at any event."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

READ_S = 90.0


class EventStream:
    """One request whose answer is a stream; iterating gives its events as bytes, ids included.

    It is a POST with a body, or a GET without one.
    """

    def __init__(
        self,
        port: int,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READ_S)
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        own = {"Content-Type": "application/json", **(headers or {})}
        method, sent = ("GET", None) if body is None else ("POST", json.dumps(body))
        self._connection.request(method, path, sent, own)
        self._response = self._connection.getresponse()
        self.status = self._response.status
        self.headers = dict(self._response.getheaders())
        self.retry_ms: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()

    def __iter__(self) -> Iterator[bytes]:
        """Events up to the end; raises `ConnectionError` where the server vanishes."""
        rest = event = b""
        while piece := self._read():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b":"):
                    continue
                if line.startswith(b"retry: "):
                    self.retry_ms = int(line.removeprefix(b"retry: "))
                    continue
                event += line + b"\n"
                if not line:
                    yield event
                    event = b""
        assert not event + rest, event + rest

    def _read(self) -> bytes:
        """What has come; "" only behind the last chunk (`readline` would take any end for it)."""
        try:
            return self._response.read1()
        except http.client.IncompleteRead as error:
            raise ConnectionResetError from error

    def body(self) -> bytes:
        """The rest of the answer."""
        return self._response.read()

    def cut(self) -> None:
        """Close the socket, as the kernel does for a process that was killed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._connection.close()


def id_of(event: bytes) -> str:
    """The id of an event."""
    (line,) = (line for line in event.splitlines() if line.startswith(b"id: "))
    return line.removeprefix(b"id: ").decode()


def data_of(event: bytes) -> Any:
    """The JSON of an event; None at the end of a stream."""
    (line,) = (line for line in event.splitlines() if line.startswith(b"data: "))
    data = line.removeprefix(b"data: ")
    return None if data == b"[DONE]" else json.loads(data)
