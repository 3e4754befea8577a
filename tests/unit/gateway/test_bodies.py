"""Bodies that cannot be sent on are refused, and harm nobody beside them."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import queue
import threading
from collections import Counter
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from gateway.http.errors import GatewayError
from gateway.http.incoming import (
    MAX_DEPTH,
    Bodies,
    parse_body,
    read_deadline,
    refuse_beam_search,
    with_file_urls,
)
from gateway.http.sse import BodyErrors
from gateway.queue.calls import Broker
from gateway.queue.yard import YardQueue
from tests.support.builders import make_request
from tokenyard.protocol.gateway_settings import MAX_BODY_ITEMS, GatewaySettings
from tokenyard.scripts.answers import Acceptance, Submitted


@pytest.mark.parametrize(
    "body", [{"user": "\ud800"}, {"\udfff": 1}, {"a": [{"b": "\ude00\ud83d"}]}], ids=str
)
def test_half_a_character_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(GatewayError, match="not Unicode"):
        parse_body(json.dumps(body).encode())


def test_a_character_in_two_halves_is_none_of_them() -> None:
    assert parse_body(json.dumps({"a": "😀"}).encode()) == {"a": "😀"}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "file_id": "f", "detail": "low"}],
                }
            ],
            [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": "f", "detail": "low"}],
                }
            ],
        ),
        (
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            {"type": "image", "source": {"type": "url", "url": "f"}},
        ),
        (
            {"type": "tool_result", "content": [{"type": "image", "source": {"type": "file"}}]},
            {
                "type": "tool_result",
                "content": [{"type": "image", "source": {"type": "url", "url": None}}],
            },
        ),
        *(
            (same, same)
            for same in (
                "text",
                None,
                [1],
                {"content": None},
                {"type": "input_image", "file_id": None, "image_url": "u"},
                {"type": "image", "source": "file"},
                {"type": "image", "source": {"type": "base64", "data": ""}},
                {"type": "input_file", "file_id": "f"},
            )
        ),
    ],
)
def test_a_file_stands_in_the_place_of_a_url(given: Any, found: Any) -> None:
    before = copy.deepcopy(given)
    assert with_file_urls(given) == found
    assert given == before


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b'{"a":[' + b"{}," * (MAX_BODY_ITEMS // 4) + b"{}]}", 413),
        (b'{"a":[' + b"[]," * (MAX_BODY_ITEMS // 4) + b"[]]}", 413),
        (json.dumps(dict.fromkeys(range(MAX_BODY_ITEMS // 4))).encode(), 413),
        (b'{"a":[' + b"1," * MAX_BODY_ITEMS + b"1]}", 413),
        (b'{"a":' + b"[" * 2 * MAX_DEPTH + b"]" * 2 * MAX_DEPTH + b"}", 400),
        (b'{"a":' * 20_000, 400),
        (b"[" * 10_000, 400),
    ],
    ids=["objects", "lists", "members", "numbers", "depth", "objects in objects", "without an end"],
)
def test_a_body_of_too_many_values_is_refused(raw: bytes, status: int) -> None:
    with pytest.raises(GatewayError) as refused:
        parse_body(raw)
    assert refused.value.status == status


def test_a_large_body_is_decoded_as_a_small_one() -> None:
    numbers = [[n, -n / 3, f"{n}é\n", {"a": None, "b": [True]}] for n in range(9000)]
    body = {"a": numbers, "b": "{,[" * 20_000}
    assert parse_body(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    "text", ["[,{:" * MAX_BODY_ITEMS, '"[,' * MAX_BODY_ITEMS, "\\[" * MAX_BODY_ITEMS, "\\"]
)
def test_what_stands_in_a_text_is_no_value(text: str) -> None:
    assert parse_body(json.dumps({"a": text, "b": [text]}).encode()) == {"a": text, "b": [text]}


async def test_only_so_many_bytes_may_be_unfinished() -> None:
    settings = GatewaySettings(redis_url="redis://127.0.0.1:1", max_unfinished_bytes=80)
    bodies = Bodies(settings)
    waits = asyncio.Event()

    def slow(size: int, more: int = 1) -> Any:
        messages = [{"type": "http.request", "body": b" " * size, "more_body": bool(more)}]

        async def receive() -> Message:
            if not messages:
                await waits.wait()
                return {"type": "http.request", "body": b"", "more_body": False}
            return messages.pop()

        return receive

    async def refusal(client: str) -> int:
        with pytest.raises(GatewayError) as refused:
            await bodies.read(slow(1), client)
        return refused.value.status

    names = ["a", "b", "c", "d"]
    first = [asyncio.create_task(bodies.read(slow(20), name)) for name in names]
    await asyncio.sleep(0)
    assert await refusal("a") == 429  # has its quarter
    assert await refusal("e") == 503  # all together
    assert await bodies.read(slow(1, more=0), "e") == b" "  # whole at once
    waits.set()
    assert [len(body) for body in await asyncio.gather(*first)] == [20] * 4
    assert len(await bodies.read(slow(20), "a")) == 20


async def test_large_bodies_of_a_client_are_parsed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: queue.Queue[bytes] = queue.Queue()
    may_end, running, most = threading.Event(), Counter[bytes](), Counter[bytes]()

    def parse(raw: bytes, _: int) -> dict[str, Any]:
        running[raw] += 1
        most[raw] = max(most[raw], running[raw])
        begun.put(raw)
        assert may_end.wait(30)
        running[raw] -= 1
        return {}

    monkeypatch.setattr("gateway.http.incoming.parse_body", parse)
    bodies = Bodies(GatewaySettings(redis_url="redis://127.0.0.1:1"))
    names = ["a", "a", "b"]
    asked = [asyncio.create_task(bodies.parse(one.encode() * 20_000, one)) for one in names]
    found = [await asyncio.to_thread(begun.get, timeout=30) for _ in range(2)]
    assert len({*found}) == 2
    may_end.set()
    await asyncio.gather(*asked)
    assert {*most.values()} == {1}
    assert begun.qsize() == 1


@pytest.mark.parametrize("given", [True, "true", 1, "on"])
def test_beam_search_is_refused_in_each_way_that_vllm_reads(given: Any) -> None:
    with pytest.raises(GatewayError) as refused:
        refuse_beam_search({"use_beam_search": given})
    assert (refused.value.status, refused.value.param) == (400, "use_beam_search")


@pytest.mark.parametrize("body", [{}, {"use_beam_search": False}, {"use_beam_search": None}])
def test_no_beam_search_is_no_fault(body: dict[str, Any]) -> None:
    refuse_beam_search(body)


async def test_a_request_that_cannot_be_written_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def accept(_broker: Broker, _before: Any, calls: list[Any]) -> list[list[Acceptance]]:
        counts = [sum(":request:" in str(key) for key in call.keys) for call in calls]
        return [[Acceptance(Submitted.ACCEPTED)] * count for count in counts]

    monkeypatch.setattr(Broker, "call_behind", accept)
    queue = YardQueue("redis://127.0.0.1:1", "yard")
    asked = [make_request(), make_request(metadata={"a": "\ud800"}), make_request()]
    given = [queue.submit(one, "normal", refuse_late=False) for one in asked]
    first, bad, last = await asyncio.gather(*given, return_exceptions=True)

    assert first.code is last.code is Submitted.ACCEPTED
    assert isinstance(bad, ValueError)


@pytest.mark.parametrize(
    ("status", "was_asked", "expected"),
    [(500, False, 400), (500, True, 500), (200, False, 200), (404, False, 404)],
)
async def test_a_500_before_the_queue_is_asked_is_the_bodys_fault(
    status: int, was_asked: bool, expected: int
) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    errors = BodyErrors(send, "/v1/completions", lambda: was_asked)
    text = json.dumps({"error": {"message": "no attribute"}}).encode()
    await errors.send({"type": "http.response.start", "status": status, "headers": []})
    await errors.send({"type": "http.response.body", "body": text})

    assert errors.is_replaced is (status != expected)
    assert sent[0]["status"] == expected
    assert "no attribute" in json.loads(sent[1]["body"])["error"]["message"]


def form(*parts: tuple[str, str]) -> tuple[bytes, dict[str, Any]]:
    """A form of names and contents, and its scope; `file` is a file."""
    raw = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"'
        f"{'; filename=a.wav' if name == 'file' else ''}\r\n\r\n{content}\r\n"
        for name, content in parts
    )
    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    return f"{raw}--x--\r\n".encode(), {"type": "http", "headers": headers}


async def test_a_form_is_told_as_json_would_be() -> None:
    bodies = Bodies(GatewaySettings(redis_url="redis://127.0.0.1:1"))
    raw, scope = form(("model", "a"), ("b[]", "1"), ("b[]", "2"), ("stream", "True"), ("file", "c"))
    told = await bodies.parse_form(raw, scope, "me")
    digest = hashlib.sha256(b"c").hexdigest()
    assert told.value == {"model": "a", "b[]": ["1", "2"], "stream": True, "file": digest}
    assert told.form is not None
    assert await told.form["file"].read() == b"c"  # type: ignore[union-attr]
    await told.form.close()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([("file", "a"), ("file", "b")], "number of files is 1"),
        ([("a", "b")] * 65, "number of fields is 64"),
        ([("a", "b" * 2**20 + "c")], "exceeded maximum size"),
    ],
    ids=["files", "fields", "bytes"],
)
async def test_a_form_has_bounds(parts: list[tuple[str, str]], why: str) -> None:
    bodies = Bodies(GatewaySettings(redis_url="redis://127.0.0.1:1"))
    with pytest.raises(GatewayError, match=why) as refused:
        await bodies.parse_form(*form(*parts), "me")
    assert refused.value.status == 400


async def test_a_form_ends_where_it_says() -> None:
    bodies = Bodies(GatewaySettings(redis_url="redis://127.0.0.1:1"))
    raw, scope = form(("file", "a"))
    for broken, kind in ((raw, "application/json"), (raw, "multipart/form-data"), (b"--y", None)):
        told = scope if kind is None else {**scope, "headers": [(b"content-type", kind.encode())]}
        with pytest.raises(GatewayError) as refused:
            await bodies.parse_form(broken, told, "me")
        assert refused.value.status == 400


async def test_a_body_may_have_a_bound_of_its_own() -> None:
    bodies = Bodies(GatewaySettings(redis_url="redis://127.0.0.1:1", max_body_bytes=10))

    async def receive() -> Message:
        return {"type": "http.request", "body": b" " * 20}

    assert len(await bodies.read(receive, "me", 20)) == 20
    for most in (None, 19):
        with pytest.raises(GatewayError, match=r"more than 1[09] bytes"):
            await bodies.read(receive, "me", most)


# How long a client will wait.

NOW_MS = 1_000_000.0


def deadline(header: str | None = None, **body: Any) -> int | None:
    headers = Headers({"x-request-timeout-ms": header} if header is not None else {})
    return read_deadline(headers, body, NOW_MS)


def test_without_one_there_is_no_deadline() -> None:
    assert deadline() is None
    assert deadline(timeout=None) is None


@pytest.mark.parametrize(("header", "body"), [("1500", {}), (None, {"timeout": 1.5})])
def test_header_and_field_say_the_same(header: str | None, body: dict[str, Any]) -> None:
    assert deadline(header, **body) == NOW_MS + 1500


def test_the_header_counts_before_the_field() -> None:
    assert deadline("1000", timeout=9999) == NOW_MS + 1000


@pytest.mark.parametrize("header", ["", "0", "-1", "1.5", "x", "9" * 30, "9" * 5000, "\xb2"])
def test_a_bad_header_is_refused(header: str) -> None:
    with pytest.raises(GatewayError, match="milliseconds") as refused:
        deadline(header)
    assert (refused.value.status, refused.value.param) == (400, "X-Request-Timeout-Ms")


@pytest.mark.parametrize("seconds", [0, -1, True, "5", [5], 1e300, float("nan"), float("inf")])
def test_a_bad_field_is_refused(seconds: Any) -> None:
    with pytest.raises(GatewayError) as refused:
        deadline(timeout=seconds)
    assert refused.value.param == "timeout"
