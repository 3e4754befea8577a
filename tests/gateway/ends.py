"""What must hold after a search: each accepted request has an end, and nobody was restarted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import httpx

from tests.gateway.speaker import text_behind
from tests.gateway.stand import Door, Stand
from tests.support.waiting import eventually

UNFINISHED: Final = {b"waiting", b"assigned"}
CLASSES: Final = ("high", "normal", "low")
ENDS_S: Final = 120.0


@contextmanager
def all_ends(stand: Stand, door: Door) -> Iterator[None]:
    """Check the block's requests, the processes, and that a good request is served."""
    check_good_request(door)
    before = processes(stand, door)
    yield
    eventually(lambda: not unfinished(stand), timeout_s=ENDS_S)
    assert processes(stand, door) == before
    check_good_request(door)


def unfinished(stand: Stand) -> list[str]:
    """The requests of HTTP clients that wait or run, by their ledgers; and what has none yet."""
    keys, connection = stand.plant.keys, stand.plant.connection
    left = [name for name in CLASSES if connection.xlen(keys.intake(name))]
    ledgers = list(connection.scan_iter(match=keys.ledger("http*", "*"), count=1000))
    pipeline = connection.pipeline(transaction=False)
    for ledger in ledgers:
        pipeline.hget(ledger, "state")
    states = zip(ledgers, pipeline.execute(), strict=True)
    return left + [ledger.decode() for ledger, state in states if state in UNFINISHED]


def processes(stand: Stand, door: Door) -> set[int]:
    """Those that a bad request could end."""
    assert door.program.is_running
    assert stand.host.is_running
    workers = {worker.pid for worker in stand.host.children()}
    assert workers
    return {door.program.pid, stand.host.pid} | workers


def check_good_request(door: Door) -> None:
    """A good request, to the model of the bad ones, has its answer."""
    body = {"model": "speaker", "prompt": "a", "max_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{door.url}/v1/completions", json=body, timeout=ENDS_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text_behind("a", 5)
