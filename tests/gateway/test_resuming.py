"""Streams survive the death of client, gateway, worker and coordinator, byte for byte.

Each endpoint is asked once without a disturbance. Then the queue forgets the answer, but not the
gateway's record of the request, so that the next run under the same key has the same ids and time
and must give the same bytes, whatever is killed meanwhile. A kill counts only if it hit a running
request.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
#: A kill near the end may come too late on a busy machine. That it hits is asked of one of so many.
TRIES: Final = 5
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


def durable_id_of(events: list[bytes]) -> str:
    """The id of the request that these events answer."""
    return id_of(events[0]).partition(":")[0]


@dataclass(frozen=True, slots=True)
class Known:
    """An answer without a disturbance."""

    key: str
    events: list[bytes]
    #: The requests on the queue that it came from.
    ledgers: list[bytes]


class Undisturbed:
    """The answer of each endpoint, which the queue has forgotten."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._known: dict[str, Known] = {}

    def of(self, endpoint: str) -> Known:
        """The answer, and the key under which it came."""
        if endpoint not in self._known:
            self._known[endpoint] = self._ask(*ASKED[endpoint])
        known = self._known[endpoint]
        self._stand.forget(durable_id_of(known.events))
        return known

    def _ask(self, path: str, body: dict[str, Any]) -> Known:
        key = random_name("key")
        with EventStream(self._stand.door(0).port, path, body, {"Idempotency-Key": key}) as one:
            assert one.status == 200, one.body()
            events = list(one)
        ledgers = [found for found in self._keys_of(events) if b"request:" in found]
        assert ledgers
        return Known(key, events, ledgers)

    def _keys_of(self, events: list[bytes]) -> list[bytes]:
        match = f"*{durable_id_of(events)}*"
        return list(self._stand.plant.connection.scan_iter(match=match, count=1000))


@pytest.fixture(scope="module")
def undisturbed(stand: Stand) -> Undisturbed:
    return Undisturbed(stand)


class Killing:
    """One kill, and whether it hit a request that was running."""

    def __init__(self, stand: Stand, victim: Victim, known: Known, at: int) -> None:
        stand.wait_until_whole()
        self._stand = stand
        self._victim = victim
        self._known = known
        self._at = at
        self._door = stand.door(0)
        self._term = stand.plant.wait_for_leader()
        self._is_done = False
        self._was_running = False
        self._lost = 0

    def look(self, stream: EventStream, seen: int) -> None:
        """Kill once ``at`` events were seen."""
        if self._is_done or seen < self._at:
            return
        self._is_done = True
        if self._victim == "client":
            stream.cut()
        elif self._victim == "gateway":
            self._door.program.signal(signal.SIGKILL)
        elif self._victim == "worker":
            self._stand.kill_worker()
        else:
            self._stand.kill_leader()
        states = {self._field(name, "state") for name in self._known.ledgers}
        self._was_running = bool(states & {b"waiting", b"assigned"})
        self._replace()

    def _replace(self) -> None:
        if self._victim == "client":
            raise ConnectionResetError
        if self._victim == "gateway":
            self._door.kill_and_start()
        elif self._victim == "coordinator":
            self._stand.start_coordinator()

    def lost(self) -> None:
        """A connection broke off."""
        self._lost += 1

    def has_hit(self) -> bool:
        """Whether the request was running; fails where the kill did not do its work."""
        assert self._is_done
        if not self._was_running:
            return False
        if self._victim in ("client", "gateway"):
            assert self._lost
        elif self._victim == "worker":
            attempts = [int(self._field(name, "attempt") or 0) for name in self._known.ledgers]
            assert max(attempts) > 1, attempts
        else:
            self._stand.plant.wait_for_leader(other_than=self._term)
        return True

    def _field(self, ledger: bytes, name: str) -> bytes | None:
        found: bytes | None = self._stand.plant.connection.hget(ledger, name)
        return found


def disturbed(
    ports: Iterator[int], path: str, body: dict[str, Any], key: str, killing: Killing
) -> list[bytes]:
    """Ask, and reconnect to the next gateway behind the last event until the end."""
    events: list[bytes] = []
    for _ in range(8):
        headers = {"Idempotency-Key": key}
        if events:
            headers["Last-Event-ID"] = id_of(events[-1])
        try:
            with EventStream(next(ports), path, body, headers) as stream:
                assert stream.status == 200, (stream.status, stream.body())
                for event in stream:
                    events.append(event)
                    killing.look(stream, len(events))
                return events
        except ConnectionError:
            killing.lost()
    pytest.fail("eight connections were lost")


def check(
    stand: Stand, undisturbed: Undisturbed, endpoint: str, victim: Victim, part: float
) -> None:
    path, body = ASKED[endpoint]
    for _ in range(TRIES):
        known = undisturbed.of(endpoint)
        killing = Killing(stand, victim, known, max(1, round(part * len(known.events))))
        turns = (stand.port(number % 2) for number in range(8))
        got = disturbed(turns, path, body, known.key, killing)
        assert b"".join(got) == b"".join(known.events)
        if killing.has_hit():
            return
    pytest.fail(f"the request was over before each of {TRIES} kills")


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
