"""Cancels in every state: one immediate result, and a free place for the next request."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.streams import check_beginning, check_exact, streams, wait_mid_stream
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.scripts.answers import Cancelled, Submitted

pytestmark = pytest.mark.crash

LONG = 4_000  # tokens, more than a test waits for


def cancel(plant: Plant, request: Request) -> None:
    """Cancel a request; its result is published when the call returns."""
    assert plant.scripts.cancel("anon", request.id, "enough") is Cancelled.CANCELLED
    check_cancelled(plant, request)


def check_cancelled(plant: Plant, request: Request) -> None:
    """Check for one result `cancelled` with the published tokens, and for no leftovers."""
    answer = check_beginning(plant, request)
    assert answer.result.status == "cancelled"
    assert answer.result.error.code == "CANCELLED"
    assert plant.ledger(request.id)["state"] == "cancelled"
    assert not plant.connection.exists(plant.keys.tokens("anon", request.id))


def settle(plant: Plant) -> None:
    """Wait until no request waits or runs."""
    lanes = [plant.keys.lane(worker) for worker in plant.roster()]
    intakes = [plant.keys.intake("normal"), plant.keys.intake("retry")]
    eventually(lambda: not any(plant.connection.xlen(stream) for stream in lanes + intakes))


@pytest.mark.long
def test_cancel_of_a_waiting_request_leaves_the_others_alone(plant: Plant) -> None:
    # Given requests that are unread, and others that wait behind a full worker
    unread = streams(2, max_tokens=5)
    plant.push_all(unread)
    assert plant.scripts.submit("normal", [make_request("known")])[0].code is Submitted.ACCEPTED
    assert plant.scripts.cancel("anon", "known", "enough") is Cancelled.CANCELLED
    # (a plain XADD has no ledger yet: the coordinator drops it when it reads it)
    assert (
        plant.scripts.cancel("anon", unread[0].id, "enough") is Cancelled.CANCELLED_BEFORE_ARRIVAL
    )
    plant.up(max_num_seqs=1, simulated_step_s=0.02)
    check_exact(plant, [unread[1]])
    first, second, *waiting = streams(5, max_tokens=100)
    plant.push_all([first, second, *waiting])
    wait_mid_stream(plant, [first])
    assert (
        plant.scripts.cancel("anon", waiting[0].id, "enough") is Cancelled.CANCELLED_BEFORE_ARRIVAL
    )
    last = make_request(params=SamplingParams(max_tokens=1))
    assert plant.scripts.submit("normal", [last])[0].code is Submitted.ACCEPTED

    # If a waiting one is cancelled
    cancel(plant, last)

    # I expect the others to complete, and no further reply to the cancelled ones.
    check_exact(plant, [first, second, *waiting[1:]])
    settle(plant)
    for one in (unread[0], waiting[0], last):
        check_cancelled(plant, one)
    assert plant.scripts.cancel("anon", last.id, "again") is Cancelled.OVER
    assert plant.scripts.cancel("anon", first.id, "late") is Cancelled.OVER


def test_cancel_of_a_running_request_frees_its_lane_place(plant: Plant) -> None:
    # Given an engine for one request at a time, with one running, one on its lane, one waiting
    plant.up(max_num_seqs=1, simulated_step_s=0.01)
    running, on_lane, waiting = [*streams(2, max_tokens=LONG), *streams(1, max_tokens=5)]
    plant.push_all([running, on_lane, waiting])
    wait_mid_stream(plant, [running])
    eventually(lambda: plant.ledger(on_lane.id).get("state") == "assigned")

    # If the one on the lane and the one that runs are cancelled
    cancel(plant, on_lane)
    cancel(plant, running)

    # I expect the waiting one to take a free place.
    check_exact(plant, [waiting])
    settle(plant)
    check_cancelled(plant, running)
    check_cancelled(plant, on_lane)


@pytest.mark.long
def test_cancel_of_a_lost_workers_request_outlasts_the_rescue(plant: Plant) -> None:
    # Given streams on a stalled host, and no coordinator that could rescue them
    leader = plant.coordinator()
    controller = plant.worker(simulated_step_s=0.02)
    plant.wait_for_workers(1)
    first, second, third = requests = streams(3)
    plant.push_all(requests)
    wait_mid_stream(plant, requests)
    leader.kill()
    host = controller.suspend()

    # If they are cancelled before the rescue, during it, or while they wait for another worker
    cancel(plant, first)
    plant.end_lead()
    plant.end_leases("w")
    plant.coordinator()
    eventually(lambda: plant.ledger(third.id).get("intake") == "retry")
    cancel(plant, second)

    # I expect only the third to continue, even when the host resumes with all three.
    for process in host:
        process.resume()
    check_exact(plant, [third])
    settle(plant)
    check_cancelled(plant, first)
    check_cancelled(plant, second)
