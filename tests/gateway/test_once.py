"""The same `Idempotency-Key` runs once, through any gateway, whatever happens to the connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import httpx2
import pytest
from openai import OpenAI

from tests.gateway.asked import say
from tests.gateway.events import EventStream, id_of
from tests.gateway.stand import Door, Stand
from tests.support.builders import random_name

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

CHAT: Final = "/v1/chat/completions"
ASKED: Final[dict[str, Any]] = {
    "model": "speaker",
    "messages": say("abc"),
    "temperature": 1.5,  # without a seed: a second run would give another text
    "max_tokens": 60,
}


def runs(stand: Stand) -> int:
    """Requests that the yard has accepted so far."""
    intake = stand.plant.keys.intake("normal")
    if not stand.plant.connection.exists(intake):
        return 0
    about: Any = stand.plant.connection.xinfo_stream(intake)
    return int(about["entries-added"])


def at_once(*calls: Callable[[], bytes]) -> list[bytes]:
    """The results of calls that begin together."""
    barrier = threading.Barrier(len(calls))

    def together(call: Callable[[], bytes]) -> bytes:
        barrier.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(together, calls))


def ask(port: int, key: str, body: dict[str, Any] = ASKED) -> bytes:
    headers = {"Idempotency-Key": key}
    answer = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body, headers=headers, timeout=90.0)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_two_at_the_same_moment_run_once(
    stand: Stand, door: Door, other_door: Door, stream: bool
) -> None:
    key, body = random_name("key"), ASKED | {"stream": stream}
    before = runs(stand)

    answers = at_once(
        *(lambda port=port: ask(port, key, body) for port in [door.port, other_door.port] * 3)
    )

    assert len(set(answers)) == 1
    assert runs(stand) == before + 1


def test_a_key_is_not_taken_by_another_body(door: Door, other_door: Door) -> None:
    key = random_name("key")
    ask(door.port, key)
    url = f"{other_door.url}{CHAT}"

    for other in (ASKED | {"max_tokens": 61}, ASKED | {"stream": True}):
        refused = httpx.post(url, json=other, headers={"Idempotency-Key": key}, timeout=90.0)
        assert refused.status_code == 422, refused.text
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
        assert refused.headers["x-should-retry"] == "false"
    assert ask(other_door.port, key, dict(reversed(ASKED.items()))) == ask(door.port, key)


@pytest.mark.parametrize(
    ("change", "headers"),
    [
        ({"max_tokens": -1}, {}),
        ({"messages": 1}, {}),
        ({"temperature": 99}, {}),
        ({"max_tokens": 10**6}, {}),
        ({}, {"X-Tokenyard-On-Disconnect": "maybe"}),
        ({}, {"X-Request-Timeout-Ms": "soon"}),
    ],
)
def test_a_refused_body_leaves_its_key_free(
    door: Door, other_door: Door, change: dict[str, Any], headers: dict[str, str]
) -> None:
    key = random_name("key")
    given = headers | {"Idempotency-Key": key}
    for _ in range(2):
        refused = httpx.post(f"{door.url}{CHAT}", json=ASKED | change, headers=given, timeout=90.0)
        assert refused.status_code == 400, refused.text

    ask(other_door.port, key, ASKED | {"max_tokens": 2})


def test_a_request_id_is_for_correlation_only(stand: Stand, door: Door) -> None:
    headers, before = {"X-Request-Id": "of a mesh"}, runs(stand)

    bodies = [ASKED, ASKED, ASKED | {"max_tokens": 3}, ASKED | {"messages": 1}]
    answers = [
        httpx.post(f"{door.url}{CHAT}", json=body, headers=headers, timeout=90.0) for body in bodies
    ]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert runs(stand) == before + 3
    assert len({answer.json()["id"] for answer in answers[:3]}) == 3
    assert {answer.headers["x-request-id"] for answer in answers} == {"of a mesh"}


def test_a_retry_after_a_lost_connection_gets_the_first_run(
    stand: Stand, door: Door, other_door: Door
) -> None:
    key, body = random_name("key"), ASKED | {"stream": True, "max_tokens": 300, "ignore_eos": True}
    before = runs(stand)
    with EventStream(door.port, CHAT, body, {"Idempotency-Key": key}) as first:
        seen = [event for event, _ in zip(first, range(3), strict=False)]

    with EventStream(other_door.port, CHAT, body, {"Idempotency-Key": key}) as again:
        events = list(again)

    assert events[:3] == seen
    assert len(events) > 200
    assert runs(stand) == before + 1


def test_the_answer_names_the_request_for_those_who_gave_no_key(
    door: Door, other_door: Door
) -> None:
    body = ASKED | {"stream": True}
    headers = {"X-Tokenyard-On-Disconnect": "continue"}
    with EventStream(door.port, CHAT, body, headers) as first:
        seen = [event for event, _ in zip(first, range(5), strict=False)]
    last = id_of(seen[-1])

    with EventStream(other_door.port, CHAT, body, {"Last-Event-ID": last}) as again:
        rest = list(again)

    assert last.startswith(first.headers["x-request-id"])
    assert id_of(rest[0]) == last.replace(":5", ":6")
    assert rest[-1].endswith(b"data: [DONE]\n\n")


def test_the_sdks_own_retries_carry_the_key(stand: Stand, door: Door, other_door: Door) -> None:
    key, port = random_name("key"), iter([door.port, other_door.port, other_door.port])
    before = runs(stand)

    class Losing(httpx2.HTTPTransport):
        """Loses the first answer on its way, and asks another gateway then."""

        lost = False

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            request.url = request.url.copy_with(port=next(port))
            answer = super().handle_request(request)
            if not self.lost:
                self.lost = True
                answer.read()
                raise httpx2.ReadError("lost", request=request)
            return answer

    with httpx2.Client(transport=Losing()) as http:
        sdk = OpenAI(base_url=f"{door.url}/v1", api_key="none", http_client=http, max_retries=2)
        sdk.chat.completions.create(**ASKED, extra_headers={"Idempotency-Key": key})

    assert runs(stand) == before + 1
