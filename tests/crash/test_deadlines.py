"""Deadlines in every state of a request, and the bound of the intake."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.streams import check_beginning, check_serves, streams, wait_mid_stream
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request, SamplingParams

pytestmark = pytest.mark.crash

LONG = 4_000  # tokens, more than an engine makes in time


def soon(plant: Plant, after_s: float) -> int:
    seconds, micros = plant.connection.time()
    return int(seconds * 1000 + micros / 1000 + after_s * 1000)


def check_expired(plant: Plant, request: Request, where: str) -> list[int]:
    """Check for one result, not before the deadline, that names the state; return its tokens."""
    result = plant.result(request.id)
    assert request.deadline_ms is not None
    assert _ended_ms(plant, request) >= request.deadline_ms
    assert (result.status, result.error.code) == ("expired", "DEADLINE_EXCEEDED")
    assert where in result.error.message
    assert plant.ledger(request.id)["state"] == "expired"
    return check_beginning(plant, request).result.tokens


@pytest.mark.long
def test_request_behind_a_full_worker_expires_in_time(plant: Plant) -> None:
    plant.up(max_num_seqs=1, simulated_step_s=0.02)
    plant.push_all(streams(2, max_tokens=LONG))
    eventually(lambda: not plant.connection.xlen(plant.keys.intake("normal")))
    (held,) = streams(1, deadline_ms=soon(plant, 0.5))
    plant.push(held)

    assert check_expired(plant, held, "in the intake") == []
    waited_ms = _ended_ms(plant, held) - (held.deadline_ms or 0)
    assert waited_ms < 20_000, "measured: 10 ms"


@pytest.mark.long
def test_expired_requests_on_a_lane_free_their_places(plant: Plant) -> None:
    # Given an engine for two: a stream, a request that does not stream, and a third on the lane
    plant.up(max_num_seqs=2, simulated_step_s=0.01)
    deadline_ms = soon(plant, 5.0)
    (stream,) = streams(1, max_tokens=LONG, deadline_ms=deadline_ms)
    params = SamplingParams(max_tokens=LONG)
    quiet = make_request(tokens=[7, 7], params=params, deadline_ms=deadline_ms)
    (on_lane,) = streams(1, max_tokens=LONG, deadline_ms=deadline_ms)
    plant.push_all([stream, quiet])
    wait_mid_stream(plant, [stream])
    plant.push(on_lane)

    # I expect their tokens so far, and the state in which they expired.
    shown = check_expired(plant, stream, "running")
    assert len(shown) >= 3
    assert len(check_expired(plant, quiet, "running")) >= 3
    assert check_expired(plant, on_lane, "on the worker's lane") == []
    # I expect their places to be free again.
    check_serves(plant)


def _ended_ms(plant: Plant, request: Request) -> int:
    entry = plant.connection.xrange(plant.keys.reply("anon", request.id))[-1][0]
    return int(entry.split(b"-")[0])
