"""An answer that a stopping gateway ends early."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gateway.http.sse import OpenAnswer
from tests.unit.gateway.test_answer import Connection, body

EVENT = b"id: %s:1\ndata: {}\n\n" % (b"0" * 32)


def head(kind: bytes) -> Any:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


async def test_a_stream_ends_with_a_hint_and_is_not_completed() -> None:
    connection = Connection()
    one = OpenAnswer(connection.send)
    await one.send(head(b"text/event-stream; charset=utf-8"))
    await one.send(body(EVENT))
    await one.interrupt()
    await one.interrupt()
    await one.send(body(EVENT))
    await one.send(body(b"", more=False))
    hint = connection.body.removeprefix(EVENT)
    (retry,) = re.fullmatch(rb": .*\nretry: (\d+)\n", hint).groups()  # type: ignore[union-attr]
    assert 500 <= int(retry) <= 1500
    assert not connection.is_over


async def test_an_answer_that_has_not_begun_is_503() -> None:
    connection = Connection()
    one = OpenAnswer(connection.send)
    await one.interrupt()
    await one.send(head(b"application/json"))
    await one.send(body(b"{}", more=False))
    assert connection.head["status"] == 503
    assert connection.headers[b"retry-after"] == b"1"
    assert json.loads(connection.body)["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_an_answer_that_is_over_stays_as_it_is(kind: bytes) -> None:
    connection = Connection()
    one = OpenAnswer(connection.send)
    await one.send(head(kind))
    await one.send(body(b"{}", more=False))
    await one.interrupt()
    assert connection.body == b"{}"
    assert connection.is_over


async def test_no_hint_is_written_into_what_is_no_stream() -> None:
    connection = Connection()
    one = OpenAnswer(connection.send)
    await one.send(head(b"application/octet-stream"))
    await one.send(body(b"half"))
    await one.interrupt()
    assert connection.body == b"half"
