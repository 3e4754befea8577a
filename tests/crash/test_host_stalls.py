"""A host that stalls for longer than any timeout, and then resumes."""

from __future__ import annotations

import time

import pytest

import coordinator.recovery.rescuer
from coordinator.coordinator import Coordinator
from tests.support.builders import make_request
from tests.support.lanes import running
from tests.support.processes import Plant
from tests.support.waiting import eventually
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.wire import Request, SamplingParams

pytestmark = pytest.mark.crash


def streaming(plant: Plant, max_tokens: int) -> Request:
    """A request whose stream has begun."""
    request = make_request(stream=True, params=SamplingParams(max_tokens=max_tokens))
    plant.push(request)
    eventually(lambda: plant.published(request.id) >= 3)
    return request


@pytest.mark.long
def test_watchdog_ignores_the_time_in_which_it_was_suspended(plant: Plant) -> None:
    # Given a host whose watchdog has a short timeout, in mid-stream
    plant.coordinator()
    hang_s = 10.0
    options = {"hang_timeout_s": hang_s, "lease_ms": 9000}
    controller = plant.worker(slots=2, simulated_step_s=0.02, **options)
    workers = plant.wait_for_workers(2)
    request = streaming(plant, 200)

    # If all its processes are suspended for longer than that, and past its leases
    stalled = controller.suspend()
    until = time.monotonic() + hang_s + 1.0
    plant.end_leases("w")
    eventually(lambda: not plant.roster())
    eventually(lambda: time.monotonic() > until)
    stalled[0].resume()  # the watchdog itself first
    eventually(lambda: controller.log.count("was fenced") == 2)
    for process in stalled[1:]:
        process.resume()

    # I expect the same warm processes under new names, and the stream to continue.
    roster = plant.wait_for_workers(2)
    assert roster.keys().isdisjoint(workers)
    assert {info.pid for info in roster.values()} == {one.pid for one in stalled[1:]}
    assert plant.result(request.id).ok
    plant.answer(request.id).check_stream()
    assert "killed" not in controller.log


@pytest.mark.long
def test_standby_rescues_a_vanished_hosts_lane_as_soon_as_leases_allow(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a host that vanished a moment ago, and a standby that was connected throughout
    monkeypatch.setattr(coordinator.recovery.rescuer, "GRACE_S", 0.0)  # of its first connection
    leader = plant.coordinator(name="one")
    plant.wait_for_leader()
    settings = CoordinatorSettings(redis_url=plant.url, yard=plant.keys.yard, name="two")
    with running(Coordinator(settings)):
        for name in ("GRACE_S", "SILENCE_S"):
            monkeypatch.setattr(coordinator.recovery.rescuer, name, 600.0)
        host = plant.worker(name="a", simulated_step_s=0.02)
        plant.wait_for_workers(1)
        request = streaming(plant, 3000)
        plant.worker(name="b", simulated_step_s=0.02)
        plant.wait_for_workers(2)
        host.kill()

        # If the leader is killed as well
        leader.kill()
        plant.end_lead()
        plant.end_leases("a")

        # I expect the lane to be rescued without a time of grace.
        eventually(lambda: plant.ledger(request.id).get("worker", "").startswith("b."))
