"""Coordinators that die: a standby leads, and no accepted request is lost or served twice."""

from __future__ import annotations

import psutil
import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tokenyard.protocol.wire import SamplingParams

pytestmark = pytest.mark.crash

LEASE_MS = 1000
#: Lease of a leader that ends only when the test says so.
LONG_MS = 30_000


def test_standby_continues_with_the_entries_that_a_killed_leader_read(plant: Plant) -> None:
    # Given a leader that read more than its only worker can take, and a standby
    leader = plant.coordinator(name="one")
    token = plant.wait_for_leader()
    plant.coordinator(name="two")
    plant.worker(simulated_step_s=0.05, max_num_seqs=1)
    plant.wait_for_workers(1)
    requests = [make_request(params=SamplingParams(max_tokens=10)) for _ in range(12)]
    plant.push_all(requests)
    plant.result(requests[0].id)  # all came at once, so it has read all

    # If the leader is killed
    leader.kill()

    # I expect the standby to lead once the lease is over, and to continue with the others.
    assert plant.wait_for_leader(other_than=token).endswith(b":two")
    results = plant.results(requests)
    assert all(result.ok and result.provenance.attempt == 1 for result in results)
    assert [len(plant.answer(one.id).results) for one in requests] == [1] * len(requests)
    assert plant.connection.xlen(plant.keys.intake("normal")) == 0


@pytest.mark.long
def test_repeated_coordinator_kills_leave_one_result_for_each_request(plant: Plant) -> None:
    # Given a yard under load whose leaders are killed at arbitrary moments
    plant.worker(slots=2, max_num_seqs=4, simulated_step_s=0.01)
    plant.coordinator(lease_ms=LEASE_MS)
    plant.wait_for_workers(2)
    params = SamplingParams(max_tokens=5)
    requests = [make_request(tokens=[n + 1], params=params, stream=True) for n in range(120)]
    for at in range(0, len(requests), 40):
        plant.push_all(requests[at : at + 40])
        leader = plant.programs[-1]
        plant.result(requests[at].id)
        leader.kill()
        plant.coordinator(lease_ms=LEASE_MS)

    # I expect one result for each request, from its first and only attempt.
    results = plant.results(requests)
    assert all(result.ok and result.provenance.attempt == 1 for result in results)
    for request in requests:
        plant.answer(request.id).check_stream()


@pytest.mark.long
def test_leader_that_stalls_past_its_lease_strands_no_request(plant: Plant) -> None:
    # Given a leader that stops for longer than its lease while another takes over
    stalled = plant.coordinator(name="one", lease_ms=LONG_MS)
    token = plant.wait_for_leader()
    plant.worker(max_num_seqs=1, simulated_step_s=0.02)
    plant.wait_for_workers(1)
    plant.coordinator(name="two", lease_ms=LONG_MS)
    process = psutil.Process(stalled.pid)
    process.suspend()
    plant.end_lead()
    second = plant.wait_for_leader(other_than=token)
    requests = [make_request(params=SamplingParams(max_tokens=3)) for _ in range(20)]
    plant.push_all(requests)

    # If it resumes in the middle of its work
    process.resume()

    # I expect it to notice, to stand by, and to strand no request that it read meanwhile.
    results = plant.results(requests)
    assert all(result.ok and result.provenance.attempt == 1 for result in results)
    assert plant.connection.get(plant.keys.leader) == second
    assert stalled.is_running
    assert stalled.stop() == 0
