"""Bodies up to the limit of size, each with one place blown up: nobody waits for them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx
import psutil
import pytest

from tests.gateway.ends import all_ends
from tests.gateway.forked import ForkedGateway
from tests.gateway.stand import Door, Stand
from tests.gateway.test_fuzz import REFUSALS
from tests.gateway.test_hostile import GOOD, nested, places
from tests.support.effort import examples

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

#: Of a body.
SIZE: Final = 3_900_000
#: What may keep the event loop from its next request: seconds of the process.
LONGEST_S: Final = 0.05
#: By which all of them may enlarge the process.
MOST_BYTES: Final = 300 * 2**20


def many(value: Any, most: int = 240_000) -> list[Any]:
    """So many times as a body can hold."""
    return [value] * min(most, SIZE // (len(json.dumps(value)) + 2))


BLOW_UPS: Final[dict[str, Callable[[Any], Any]]] = {
    "text": lambda _: "a b" * (SIZE // 3),
    "word": lambda _: "a" * SIZE,
    "letters": lambda _: "é" * (SIZE // 6),
    "copies": many,
    "empty": lambda _: many({}),
    "texts": lambda _: many("a"),
    "typed": lambda _: many({"type": "text", "text": "a"}),
    "wrong": lambda _: many({"type": 1, "role": 1, "content": {}}),
    "messages": lambda _: many({"role": "user", "content": "a"}),
    "numbers": lambda _: many(65),
    "fields": lambda value: {f"{n}": value for n in range(len(many([value, "1234567"])))},
    "nested": lambda _: many(nested(60)),
}


def blown_up(path: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Names of blow-ups, and places in the good body."""
    return [(name, place) for name in BLOW_UPS for place in places(GOOD[path])]


def body(path: str, name: str, place: tuple[Any, ...]) -> bytes:
    """The good body with one place blown up."""
    good = copy.deepcopy(GOOD[path])
    *way, last = place
    inner: Any = good
    for one in way:
        inner = inner[one]
    inner[last] = BLOW_UPS[name](inner[last])
    return json.dumps(good, ensure_ascii=name != "letters").encode()


@contextmanager
def nothing_stalls(door: Door) -> Iterator[list[str]]:
    """What stalled the gateway for too long; the block adds to it. And it stays small."""
    program = door.program
    assert isinstance(program, ForkedGateway)
    stalls: list[str] = []
    memory = psutil.Process(program.pid).memory_info().rss
    yield stalls
    grown = psutil.Process(program.pid).memory_info().rss - memory
    assert stalls == []
    assert grown < MOST_BYTES, grown


@pytest.mark.parametrize("path", GOOD)
def test_no_size_holds_up_the_gateway(stand: Stand, door: Door, path: str) -> None:
    program = door.program
    assert isinstance(program, ForkedGateway)
    every = blown_up(path)
    chosen = random.Random(path).sample(every, min(len(every), examples(2, 60)))
    headers = {"Content-Type": "application/json"}
    with all_ends(stand, door), nothing_stalls(door) as stalls:
        program.stalls.take()
        for name, place in chosen:
            raw = body(path, name, place)
            answer = httpx.post(f"{door.url}{path}", content=raw, headers=headers, timeout=120.0)
            stall_s = program.stalls.take()
            assert answer.status_code == 200 or answer.status_code in REFUSALS, answer.text[:2000]
            if stall_s > LONGEST_S:
                stalls.append(f"{1000 * stall_s:.0f} ms: {name} at {place}, {answer.status_code}")
