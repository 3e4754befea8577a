"""Responses outlive the gateway that took them, and go on byte for byte on another one."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import httpx
import pytest

from tests.gateway.events import EventStream, data_of, id_of
from tests.gateway.stand import Door, Stand
from tests.gateway.test_responses import LONG, paused
from tests.support.builders import random_name
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.crash, pytest.mark.timeout(600)]

PATH: Final = "/v1/responses"
ASKED: Final[dict[str, Any]] = LONG | {"background": True, "stream": True}


def forget(stand: Stand, response_id: str) -> None:
    """Let the queue forget a request, so that it runs again under the same ids."""
    connection = stand.plant.connection
    found = list(connection.scan_iter(match=f"*{response_id}_0", count=1000))
    assert found
    connection.delete(*found)


@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_a_stream_goes_on_behind_the_last_event(stand: Stand, part: float) -> None:
    doors = [stand.door(0), stand.door(1)]
    headers = {"Idempotency-Key": random_name("key")}
    with EventStream(doors[1].port, PATH, ASKED, headers) as stream:
        undisturbed = list(stream)
    name = data_of(undisturbed[0])["response"]["id"]
    forget(stand, name)

    got: list[bytes] = []
    with (
        contextlib.suppress(ConnectionError),
        EventStream(doors[0].port, PATH, ASKED, headers) as stream,
    ):
        for event in stream:
            got.append(event)
            if len(got) >= part * len(undisturbed):
                doors[0].kill_and_start()
                break
    seen = data_of(got[-1])["sequence_number"]
    with EventStream(doors[1].port, f"{PATH}/{name}?stream=true&starting_after={seen}") as stream:
        got += list(stream)

    assert len(undisturbed) > 200
    assert b"".join(got) == b"".join(undisturbed)


def test_events_are_numbered_alike_for_both_ways_to_go_on(door: Door, other_door: Door) -> None:
    with EventStream(door.port, PATH, ASKED) as stream:
        events = list(stream)
    path = f"{PATH}/{data_of(events[0])['response']['id']}?stream=true"
    with EventStream(other_door.port, path, headers={"Last-Event-ID": id_of(events[9])}) as stream:
        assert list(stream) == events[10:]
    with EventStream(other_door.port, f"{path}&starting_after=9") as stream:
        assert list(stream) == events[10:]


@pytest.mark.parametrize("is_stream", [False, True])
def test_nobody_needs_to_watch_it(stand: Stand, is_stream: bool) -> None:
    """The gateway that took it dies before a token is there."""
    doors = [stand.door(0), stand.door(1)]
    with paused(stand):
        if is_stream:
            with EventStream(doors[0].port, PATH, ASKED) as stream:
                name = data_of(next(iter(stream)))["response"]["id"]
                doors[0].kill_and_start()
        else:
            asked = LONG | {"background": True}
            made = httpx.post(f"{doors[0].url}{PATH}", json=asked, timeout=60.0).json()
            assert made["status"] == "queued"
            name = made["id"]
            doors[0].kill_and_start()
    (ledger,) = stand.plant.connection.scan_iter(match=f"*request:*/{name}_0", count=1000)
    ended = stand.plant.connection.hget
    # Before any gateway is asked for it again.
    eventually(lambda: ended(ledger, "state") == b"completed", timeout_s=60.0)

    found = httpx.get(f"{doors[1].url}{PATH}/{name}", timeout=60.0).json()
    assert len(found["output"][0]["content"][0]["text"].encode()) > 200
