"""Streams survive the death of client, gateway, worker and coordinator, byte for byte.

Each endpoint is asked once without a disturbance. Then the queue forgets the answer, but not the
gateway's record of the request, so that the next run under the same key has the same ids and time
and must give the same bytes, whatever is killed meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import pytest

from tests.gateway.asked import LONG_TOOL, say
from tests.gateway.events import EventStream, id_of
from tests.gateway.stand import Stand
from tests.support.builders import random_name

pytestmark = [pytest.mark.vllm, pytest.mark.crash, pytest.mark.timeout(600)]

Victim = Literal["client", "gateway", "worker", "coordinator"]
VICTIMS: Final[tuple[Victim, ...]] = ("client", "gateway", "worker", "coordinator")
LENGTH: Final = 250
_COMMON: Final[dict[str, Any]] = {"model": "speaker", "temperature": 0, "stream": True}
ASKED: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "completions": (
        "/v1/completions",
        _COMMON
        | {"prompt": ["abc", "xyz"], "max_tokens": LENGTH // 2, "ignore_eos": True, "logprobs": 1},
    ),
    "chat": (
        "/v1/chat/completions",
        _COMMON
        | {"messages": say("7"), "max_tokens": LENGTH, "stream_options": {"include_usage": True}},
    ),
    "tools": (
        "/v1/chat/completions",
        _COMMON
        | {
            "messages": say("write"),
            "tools": [LONG_TOOL],
            "tool_choice": "required",
            "max_tokens": 2 * LENGTH,
        },
    ),
    "responses": (
        "/v1/responses",
        _COMMON | {"input": "abc", "max_output_tokens": LENGTH},
    ),
}
#: Parts of a stream at which a kill lands.
SHORT: Final[list[tuple[str, Victim, float]]] = [
    ("completions", "gateway", 0.3),
    ("completions", "worker", 0.5),
    ("chat", "client", 0.02),
    ("chat", "worker", 0.2),
    ("chat", "coordinator", 0.6),
    ("tools", "gateway", 0.7),
    ("tools", "worker", 0.4),
    ("responses", "client", 0.5),
    ("responses", "gateway", 0.1),
    ("responses", "coordinator", 0.3),
]
#: 112 kills.
WHOLE: Final = [
    (endpoint, victim, part / 8) for endpoint in ASKED for part in range(1, 8) for victim in VICTIMS
]


class Undisturbed:
    """The bytes of each endpoint's answer, and the key under which they came."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._known: dict[str, tuple[str, list[bytes]]] = {}

    def events(self, endpoint: str) -> tuple[str, list[bytes]]:
        """Key and events; the queue has forgotten the answer."""
        if endpoint not in self._known:
            path, body = ASKED[endpoint]
            key = random_name("key")
            with EventStream(self._stand.door(0).port, path, body, {"Idempotency-Key": key}) as one:
                assert one.status == 200, one.body()
                self._known[endpoint] = key, list(one)
        key, events = self._known[endpoint]
        self._stand.forget(id_of(events[0]).partition(":")[0])
        return key, events


@pytest.fixture(scope="module")
def undisturbed(stand: Stand) -> Undisturbed:
    return Undisturbed(stand)


def disturbed(
    ports: Iterator[int],
    path: str,
    body: dict[str, Any],
    key: str,
    at: int,
    kill: Callable[[EventStream], None],
) -> list[bytes]:
    """Ask, kill once ``at`` events are there, and reconnect to the next gateway until the end."""
    events: list[bytes] = []
    is_killed = False
    for _ in range(8):
        headers = {"Idempotency-Key": key}
        if events:
            headers["Last-Event-ID"] = id_of(events[-1])
        with (
            contextlib.suppress(ConnectionError),
            EventStream(next(ports), path, body, headers) as stream,
        ):
            assert stream.status == 200, (stream.status, stream.body())
            for event in stream:
                events.append(event)
                if len(events) >= at and not is_killed:
                    is_killed = True
                    kill(stream)
            return events
    pytest.fail("eight connections were lost")


def check(
    stand: Stand, undisturbed: Undisturbed, endpoint: str, victim: Victim, part: float
) -> None:
    path, body = ASKED[endpoint]
    key, expected = undisturbed.events(endpoint)
    doors = [stand.door(0), stand.door(1)]

    def kill(stream: EventStream) -> None:
        if victim == "client":
            stream.cut()
            raise ConnectionResetError
        if victim == "gateway":
            doors[0].kill_and_start()
        elif victim == "worker":
            stand.kill_worker()
        else:
            stand.kill_coordinator()

    turns = (doors[number % 2].port for number in range(8))
    got = disturbed(turns, path, body, key, max(1, round(part * len(expected))), kill)

    assert b"".join(got) == b"".join(expected)


@pytest.mark.parametrize(("endpoint", "victim", "part"), SHORT)
def test_a_stream_survives(
    stand: Stand, undisturbed: Undisturbed, endpoint: str, victim: Victim, part: float
) -> None:
    check(stand, undisturbed, endpoint, victim, part)


@pytest.mark.long
@pytest.mark.parametrize(("endpoint", "victim", "part"), WHOLE)
def test_a_stream_survives_a_hundred_kills(
    stand: Stand, undisturbed: Undisturbed, endpoint: str, victim: Victim, part: float
) -> None:
    check(stand, undisturbed, endpoint, victim, part)
