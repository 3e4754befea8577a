"""The reader of the chaos benchmark must see what a gateway does wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.chaos.http_reader import AskAgain, BrokenPromise, Reading

NAME = "0123456789abcdef0123456789abcdef"
DONE = f"id: {NAME}:3\ndata: [DONE]\n\n".encode()


def event(number: int, token: int) -> bytes:
    choice = {"token_ids": [token], "text": "x", "finish_reason": None}
    return f"id: {NAME}:{number}\ndata: {json.dumps({'choices': [choice]})}\n\n".encode()


def reading(*, stream: bool = True) -> Reading:
    return Reading(NAME, "key", {"stream": stream})


@contextmanager
def gateway(body: bytes, *, status: int = 200, is_whole: bool = True) -> Iterator[tuple[int, Any]]:
    """A gateway with one answer; its port, and the headers that it got."""
    seen: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.update(self.headers)
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
            if is_whole:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1], seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def read(one: Reading, body: bytes, **options: Any) -> dict[str, str]:
    with gateway(body, **options) as (port, seen):
        assert list(one.read(port)) is not None
        return dict(seen)


def test_a_whole_stream_is_read() -> None:
    one = reading()
    read(one, event(1, 5) + b": keep-alive\n" + event(2, 6) + DONE)

    assert (one.tokens, one.text, one.is_over, one.error) == ([5, 6], "xx", True, "")


def test_a_cut_stream_goes_on_behind_the_last_event() -> None:
    one = reading()
    with pytest.raises(AskAgain):
        read(one, event(1, 5) + b": stopping\nretry: 700\n", is_whole=False)
    assert (one.number, one.hints, one.is_accepted) == (1, 1, True)

    headers = read(one, event(2, 6) + DONE)

    assert headers["Last-Event-ID"] == f"{NAME}:1"
    assert (one.tokens, one.is_over) == ([5, 6], True)
    assert one.raw == event(1, 5) + event(2, 6) + DONE


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (event(2, 5), "gap"),
        (event(1, 5) + event(1, 5), "repeat"),
        (event(1, 5), "gap"),  # as if it were whole
        (event(1, 5).replace(b"0123", b"3210"), "gap"),
        (event(1, 5)[len(NAME) + 7 :], "gap"),  # without an id
    ],
)
def test_a_stream_that_is_not_whole_is_a_fault(body: bytes, kind: str) -> None:
    with pytest.raises(BrokenPromise) as broken:
        read(reading(), body)
    assert broken.value.kind == kind


@pytest.mark.parametrize("status", [429, 503, 504])
def test_a_gateway_may_ask_to_come_back(status: int) -> None:
    one = reading()
    with pytest.raises(AskAgain):
        read(one, b"{}", status=status)
    assert not one.is_accepted


@pytest.mark.parametrize("status", [400, 404, 409, 422, 500, 502])
def test_other_statuses_are_faults(status: int) -> None:
    with pytest.raises(BrokenPromise) as broken:
        read(reading(), b"Internal Server Error", status=status)
    assert broken.value.kind == "status"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_entry_was_deleted_ends(stream: bool) -> None:
    one = reading(stream=stream)
    error = {"error": {"message": "somebody deleted its entry from intake:normal"}}
    if stream:
        content = json.dumps(error)
        body = f"id: {NAME}:1\ndata: {content}\n\nid: {NAME}:2\ndata: [DONE]\n\n".encode()
        read(one, body)
    else:
        read(one, json.dumps(error).encode(), status=500)

    assert (one.is_over, one.error) == (True, "ENTRY_LOST")
