"""What no schema reaches: torn JSON, wrong encodings, hostile values, lies about lengths."""

from __future__ import annotations

import json
import random
import socket
from typing import Final

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.bad_input import GOOD, BadInput
from tests.gateway.ends import all_ends
from tests.gateway.stand import Door, Stand
from tests.gateway.test_fuzz import LONGEST_S, REFUSALS, check_stream
from tests.support.effort import examples

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("path", GOOD)
def test_no_value_breaks_the_gateway(stand: Stand, door: Door, path: str) -> None:
    @settings(max_examples=examples(30, 500), suppress_health_check=list(HealthCheck))
    @given(st.randoms())
    def search(luck: random.Random) -> None:
        sent = BadInput({}, 0, luck).spoiled(path)
        url, headers = f"{door.url}{path}", dict(sent.headers)
        answer = httpx.post(url, content=sent.body, headers=headers, timeout=LONGEST_S)
        assert answer.status_code == 200 or answer.status_code in REFUSALS, answer.text[:2000]
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
        elif answer.headers["content-type"].startswith("text/event-stream"):
            check_stream(path, answer.text)

    with all_ends(stand, door):
        search()


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b"null", b"1e999", b'{"a":' * 5000, b"[" * 60_000),
        *(b"\xff", b'{"model": "\xc3\x28"}', '{"model": "speaker"}'.encode("utf-16-le")[1:]),
        *(b"\xef\xbb\xbf{", b"\x1f\x8b\x08\x00", b"9" * 5000, b'{"model": "speaker"} x'),
    ],
)
@pytest.mark.parametrize("path", [*GOOD, "/v1/batches"])
def test_what_is_no_json_object_is_a_bad_request(door: Door, path: str, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{door.url}{path}", content=raw, headers=headers, timeout=30.0)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


BODY: Final = json.dumps(GOOD["/v1/completions"]).encode()
LIES: Final[dict[str, bytes]] = {
    "too-long": b"Content-Length: %d\r\n\r\n%s" % (len(BODY) + 10, BODY),
    "too-short": b"Content-Length: %d\r\n\r\n%s" % (len(BODY) - 10, BODY),
    "negative": b"Content-Length: -1\r\n\r\n" + BODY,
    "no-number": b"Content-Length: many\r\n\r\n" + BODY,
    "huge": b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "twice": b"Content-Length: 5\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "both": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no-chunk": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY,
    "torn-chunk": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s" % (len(BODY) + 5, BODY),
    "none": b"\r\n" + BODY,
    "wrong-encoding": b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_the_length_harms_nobody(stand: Stand, door: Door, lie: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with all_ends(stand, door), socket.create_connection(("127.0.0.1", door.port), 30.0) as client:
        client.sendall(head + LIES[lie])
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(65536), b""))

    assert b" 500 " not in answer, answer
