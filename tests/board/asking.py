"""Asks a board as a browser or a program would, or as neither ever would."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlencode

from tokenyard.board.app import Board
from tokenyard.board.settings import BoardOptions

HOST = "127.0.0.1:8001"
HERE = f"http://{HOST}"
#: What an open page accepts.
STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: str
    cookies: Sequence[str] = ()  # as they were set

    @property
    def location(self) -> str:
        return self.headers.get("location", "")

    @property
    def cookie(self) -> str:
        """The first cookie, as a browser sends it back."""
        return self.cookies[0].partition(";")[0]


@dataclass
class Asking:
    """A board and its clients; all in one event loop at a time."""

    board: Board
    host: str = HOST
    scheme: str = "http"
    headers: dict[str, str] = field(default_factory=dict)

    def __call__(
        self,
        path: str,
        method: str = "GET",
        *,
        form: Any = None,
        raw_headers: Sequence[tuple[bytes, bytes]] | None = None,
        most_bytes: int = 2**24,
        **headers: str | None,
    ) -> Answer:
        """One request; ``origin=None`` leaves out what a page of the board would send."""
        body = b"" if form is None else urlencode(form, doseq=True).encode()
        given: dict[str, str | None] = {"host": self.host, **self.headers}
        if method not in {"GET", "HEAD"}:
            given["origin"] = f"{self.scheme}://{self.host}"
        if form is not None:
            given["content-type"] = "application/x-www-form-urlencoded"
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = [
            (name.encode(), value.encode("utf-8"))
            for name, value in given.items()
            if value is not None
        ]
        return asyncio.run(self.ask(method, path, raw_headers or sent, body, most_bytes))

    async def ask(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes = b"",
        most_bytes: int = 2**24,
    ) -> Answer:
        """One request as a server would hand it over; a stream is left after some bytes."""
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": self.scheme,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode("latin-1", errors="replace"),
            "root_path": "",
            "headers": list(headers),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8001),
            "state": {},
        }
        is_sent, is_gone = False, asyncio.Event()
        status, found, cookies, pieces = 0, {}, [], bytearray()

        async def receive() -> dict[str, Any]:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name, value in message["headers"]:
                    if name == b"set-cookie":
                        cookies.append(value.decode("latin-1"))
                    found[name.decode()] = value.decode("latin-1")
            else:
                pieces.extend(message.get("body", b""))
                if len(pieces) >= most_bytes:
                    is_gone.set()

        await asyncio.wait_for(self.board.app(scope, receive, send), 60)
        return Answer(status, found, pieces.decode(errors="replace"), cookies)


@contextmanager
def opened(url: str, yard: str, **options: Any) -> Iterator[Asking]:
    """A board of a yard; without keys if nothing else is said."""
    board = Board(BoardOptions(**{"needs_keys": False, **options}), url, yard)
    try:
        yield Asking(board)
    finally:
        board.close()
