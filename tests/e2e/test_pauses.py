"""Pauses on real vLLM: greedy streams continue with unchanged tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from tokenyard import Client, Handle
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import PAUSE_MODES, Order, PauseMode, Signal
from tokenyard.protocol.keys import Keys, Yard

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

#: Nearly the model's maximum length; no stream ends before it.
LONG = {"max_tokens": 56, "temperature": 0.0, "ignore_eos": True}
QUESTIONS = [f"{first}+{second}=" for first in range(20, 40) for second in range(50, 60)]
OBEYED_S = 60.0

MidStream = Callable[[list[Handle]], int]


class Operator:
    """Gives signals, and waits until both workers obey."""

    def __init__(self, connection: redis.Redis, keys: Keys) -> None:
        self._signals = Signals(Yard(connection, keys))

    def say(self, what: Signal, mode: PauseMode = "abort") -> None:
        given = self._signals.give(Order(signal=what, mode=mode))
        assert self._signals.wait(given, OBEYED_S) == []


@pytest.fixture
def operator(broker_connection: redis.Redis, yard_keys: Keys) -> Iterator[Operator]:
    """An operator; the workers run again at the end of the test."""
    made = Operator(broker_connection, yard_keys)
    yield made
    made.say("RESUME")
    made.say("UNPAUSE")


@pytest.fixture
def mid_stream(client: Client, broker_connection: redis.Redis, yard_keys: Keys) -> MidStream:
    """Count the requests that have published tokens and have not ended."""

    def count(handles: list[Handle]) -> int:
        keys = [yard_keys.tokens(client.client_id, handle.id) for handle in handles]
        return sum(broker_connection.strlen(key) > 0 for key in keys)

    return count


def started(client: Client) -> list[Handle]:
    """Submit streams for a long backlog, and wait until the first one runs."""
    handles = [client.submit(text, stream=True, **LONG) for text in QUESTIONS]
    next(iter(handles[0]))
    return handles


def paused(
    client: Client, operator: Operator, mid_stream: MidStream, mode: PauseMode
) -> list[Handle]:
    """Pause the workers while they stream; the streams."""
    for _ in range(5):
        handles = started(client)
        operator.say("PAUSE", mode)
        if mode == "wait" or mid_stream(handles):
            break
        operator.say("UNPAUSE")  # all had ended before a slow machine gave the signal
    return handles


def undisturbed(client: Client) -> list[list[int]]:
    handles = [client.submit(text, **LONG) for text in QUESTIONS]
    return [handle.result(120).tokens for handle in handles]


@pytest.mark.parametrize("mode", PAUSE_MODES)
def test_a_pause_changes_no_token(
    client: Client, operator: Operator, mid_stream: MidStream, mode: PauseMode
) -> None:
    # If the workers pause during many streams
    expected = undisturbed(client)
    handles = paused(client, operator, mid_stream, mode)

    # I expect some to stop in mid-stream, except in the mode that waits for them,
    still = mid_stream(handles)
    assert (still == 0) == (mode == "wait")
    assert mid_stream(handles) == still

    # and all to continue to the same end.
    operator.say("UNPAUSE")
    results = [handle.result(120) for handle in handles]
    assert [result.tokens for result in results] == expected
    attempts = {result.provenance.attempt for result in results if result.provenance}
    # In mode `wait`, requests on a lane that had not begun start again.
    assert max(attempts) in {"abort": {2}, "wait": {1, 2}, "keep": {1}}[mode]


def test_a_suspension_changes_no_token(
    client: Client, operator: Operator, mid_stream: MidStream
) -> None:
    expected = undisturbed(client)
    handles = paused(client, operator, mid_stream, "keep")
    operator.say("SUSPEND")
    assert mid_stream(handles)
    operator.say("RESUME")
    operator.say("UNPAUSE")

    assert [handle.result(120).tokens for handle in handles] == expected
