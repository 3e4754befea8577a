"""One answer over HTTP, read over as many connections as it takes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.chaos.history import ENTRY_LOST, ViolationKind
from benchmarks.cold_start.serve import HOST

PATH: Final = "/v1/completions"
#: Silence after which a client looks for another gateway; gateways send a comment each second.
READ_S: Final = 5.0
#: Statuses that ask the client to come back.
_LATER: Final = frozenset({429, 503, 504})
#: How the result of a request whose entry was deleted is told.
_DELETED: Final = "deleted its entry"


def bearer(api_key: str) -> dict[str, str]:
    """The header with a key; none where gateways need none."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class AskAgain(Exception):
    """The connection was lost, or the gateway cannot answer now."""


class BrokenPromise(Exception):
    """An answer that no gateway may give: the kind of violation, and what is wrong."""

    def __init__(self, kind: ViolationKind, what: str) -> None:
        super().__init__(what)
        self.kind: ViolationKind = kind
        self.what = what


@dataclass(slots=True)
class Piece:
    """One event with new tokens."""

    tokens: list[int]
    text: str


@dataclass(slots=True)
class Reading:
    """What one reader has of an answer. ``name`` is the gateway's own name of the request."""

    name: str
    key: str
    body: Mapping[str, Any]
    api_key: str = ""
    number: int = 0  # of the last event
    raw: bytes = b""  # the events, or the body of an answer that is not a stream
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""  # with which the request ended
    is_accepted: bool = False
    is_over: bool = False
    hints: int = 0  # to come back

    def read(self, port: int) -> Iterator[Piece]:
        """Read on at a gateway; raises `AskAgain` or `BrokenPromise`."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": self.key}
        headers |= bearer(self.api_key)
        if self.number:
            headers["Last-Event-ID"] = f"{self.name}:{self.number}"
        with closing(http.client.HTTPConnection(HOST, port, timeout=READ_S)) as connection:
            try:
                connection.request("POST", PATH, json.dumps(self.body), headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    self._refused(answer.status, answer.read())
                    return
                self.is_accepted = True
                yield from self._events(answer) if self.body["stream"] else self._whole(answer)
            except (OSError, http.client.HTTPException) as error:
                raise AskAgain(f"{type(error).__name__}: {error}") from error

    def _refused(self, status: int, body: bytes) -> None:
        if status in _LATER:
            raise AskAgain(f"{status} {body[:200]!r}")
        if status != 500 or _DELETED not in body.decode(errors="replace"):
            raise BrokenPromise("status", f"{status} {body[:300]!r}")
        self.is_accepted = True
        self.fail(_DELETED)

    def fail(self, message: str) -> None:
        """The request has ended without an answer."""
        self.is_over = True
        self.error = ENTRY_LOST if _DELETED in message else message

    def _whole(self, answer: http.client.HTTPResponse) -> Iterator[Piece]:
        self.raw = answer.read()
        choice = json.loads(self.raw)["choices"][0]
        self.is_over = True
        yield self._piece(choice)

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[Piece]:
        rest = event = b""
        while part := answer.read1():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"retry:"):
                    self.hints += 1
                elif line:
                    event += b"" if line.startswith(b":") else line + b"\n"
                else:
                    yield from self._take(event)
                    event = b""
        if not self.is_over:
            raise BrokenPromise("gap", f"the stream ends behind event {self.number}")

    def _take(self, event: bytes) -> Iterator[Piece]:
        fields = dict(line.split(b": ", 1) for line in event.splitlines())
        name, _, number = fields.get(b"id", b"").decode().partition(":")
        expected = self.number + 1
        if (name, number) != (self.name, str(expected)):
            kind: ViolationKind = (
                "repeat" if number.isdecimal() and int(number) < expected else "gap"
            )
            raise BrokenPromise(kind, f"event {name}:{number} instead of number {expected}")
        self.number = expected
        self.raw += event + b"\n"
        data = fields[b"data"]
        if data == b"[DONE]":
            self.is_over = True
            return
        content = json.loads(data)
        if "error" in content:
            self.fail(content["error"]["message"])
        else:
            yield self._piece(content["choices"][0])

    def _piece(self, choice: Mapping[str, Any]) -> Piece:
        piece = Piece(choice["token_ids"] or [], choice["text"])
        self.tokens += piece.tokens
        self.text += piece.text
        return piece
