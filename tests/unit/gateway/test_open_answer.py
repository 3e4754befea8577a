"""An answer that a stopping gateway ends early."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gateway.http.open_answer import HINT, OpenAnswer

EVENT = b"id: %s:1\ndata: {}\n\n" % (b"0" * 32)


class Server:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.messages)


def head(kind: bytes) -> Any:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


def body(part: bytes, *, more: bool = True) -> Any:
    return {"type": "http.response.body", "body": part, "more_body": more}


async def test_a_stream_ends_with_a_hint_and_is_not_completed() -> None:
    server = Server()
    one = OpenAnswer(server.send)
    await one.send(head(b"text/event-stream; charset=utf-8"))
    await one.send(body(EVENT))
    await one.interrupt()
    await one.interrupt()
    await one.send(body(EVENT))
    await one.send(body(b"", more=False))
    hint = server.body.removeprefix(EVENT)
    (retry,) = re.fullmatch(rb": .*\nretry: (\d+)\n", hint).groups()  # type: ignore[union-attr]
    assert 500 <= int(retry) <= 1500
    assert all(one["more_body"] for one in server.messages[1:])


async def test_an_answer_that_has_not_begun_is_503() -> None:
    server = Server()
    one = OpenAnswer(server.send)
    await one.interrupt()
    await one.send(head(b"application/json"))
    await one.send(body(b"{}", more=False))
    start, _ = server.messages
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"] == b"1"
    assert json.loads(server.body)["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_an_answer_that_is_over_stays_as_it_is(kind: bytes) -> None:
    server = Server()
    one = OpenAnswer(server.send)
    await one.send(head(kind))
    await one.send(body(b"{}", more=False))
    await one.interrupt()
    assert server.body == b"{}"
    assert len(server.messages) == 2


async def test_no_hint_is_written_into_what_is_no_stream() -> None:
    server = Server()
    one = OpenAnswer(server.send)
    await one.send(head(b"application/octet-stream"))
    await one.send(body(b"half"))
    await one.interrupt()
    assert server.body == b"half"


@pytest.mark.long
def test_the_sdks_see_no_event_in_a_hint() -> None:
    decoders = [
        pytest.importorskip(f"{name}._streaming").SSEDecoder() for name in ("openai", "anthropic")
    ]
    for decoder in decoders:
        seen = decoder.iter_bytes(iter([EVENT, HINT % 1000]))
        assert [one.data for one in seen] == ["{}"]
