"""Worker processes and controllers that die or stall: their requests finish exactly elsewhere.

The engine is the simulated one, so every answer is known: it follows from the request alone.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.streams import (
    attempts,
    begun,
    check_exact,
    check_serves,
    dead_letters,
    held_by,
    streams,
)
from tests.support.waiting import eventually
from tokenyard.protocol.wire import SamplingParams
from tokenyard.yard.timeline import read_timeline

pytestmark = pytest.mark.crash

STEP_S = 0.02


def test_streams_of_a_killed_worker_keep_their_tokens(plant: Plant) -> None:
    # Given two worker processes in the middle of eight streams, whose leases outlast the test
    plant.up(slots=2, simulated_step_s=STEP_S, lease_ms=600_000)
    workers = plant.roster()
    requests = begun(plant, 8)
    victim = next(iter(workers))
    rescued = held_by(plant, requests, victim)
    assert 0 < len(rescued) < 8

    # If one is killed
    os.kill(workers[victim].pid, signal.SIGKILL)

    # I expect unchanged tokens, a second attempt for its requests only,
    answers = check_exact(plant, requests)
    assert attempts(answers) == [2 if one in rescued else 1 for one in requests]
    assert {plant.ledger(one.id)["crashes"] for one in rescued} == {"1"}
    # of which none is a suspect,
    assert all("suspected" not in plant.ledger(one.id) for one in rescued)
    assert not plant.connection.exists(plant.keys.quarantine)
    # and a new process under a new incarnation.
    roster = plant.wait_for_workers(2)
    assert victim not in roster
    assert {info.name for info in roster.values()} == {"w-0", "w-1"}


@pytest.mark.long
@pytest.mark.parametrize("crash_point", ["before_step:5", "mid_stream:9", "before_finish:2"])
def test_every_crash_point_leaves_exact_answers(plant: Plant, crash_point: str) -> None:
    # Given a worker that kills itself at a named point, and a healthy one
    plant.coordinator()
    plant.worker(name="sound", simulated_step_s=STEP_S)
    plant.worker(name="frail", simulated_step_s=STEP_S, crash_point=crash_point, backoff_s=30)
    plant.wait_for_workers(2)

    # If both have requests, some of them streams
    params = SamplingParams(max_tokens=20)
    quiet = [make_request(tokens=[9, n + 1], params=params) for n in range(4)]
    requests = streams(4, max_tokens=20) + quiet
    plant.push_all(requests)

    # I expect every answer to be exact, some at the second attempt.
    answers = check_exact(plant, requests)
    assert set(attempts(answers)) == {1, 2}
    rescued = [answer for answer in answers if answer.result.provenance.attempt == 2]
    assert all(answer.result.provenance.worker.startswith("sound.") for answer in rescued)


@pytest.mark.long
def test_host_that_stalls_past_its_lease_is_fenced(plant: Plant) -> None:
    # Given a host that stops in mid-stream, like a suspended machine
    plant.coordinator()
    plant.worker(name="a", simulated_step_s=STEP_S)
    controller = plant.worker(name="b", simulated_step_s=STEP_S)
    workers = plant.wait_for_workers(2)
    requests = begun(plant, 4, max_tokens=300)
    victim = next(worker for worker, info in workers.items() if info.name == "b")
    rescued = held_by(plant, requests, victim)
    assert rescued
    stalled = controller.suspend()

    # If its lease ends, its requests continue elsewhere, and then its worker resumes
    plant.end_leases("b")
    eventually(lambda: not held_by(plant, requests, victim))
    eventually(lambda: all(plant.ledger(one.id).get("attempt") == "2" for one in rescued))
    assert not any("refused" in plant.ledger(one.id) for one in rescued)
    for process in stalled[1:]:
        process.resume()

    # I expect a ledger to tell what the fence refused,
    (late, *_) = eventually(lambda: [one for one in rescued if "refused" in plant.ledger(one.id)])
    stalled[0].resume()
    at_ms, *said = plant.ledger(late.id)["refused"].split(" ")
    assert said == [victim, "1", "tokens"]
    timeline = read_timeline(plant, late.client, late.id)
    told = f"attempt 1: the fence refused tokens of {victim}"
    assert any(event.text.startswith(told) for event in timeline.events())
    given_back_ms = timeline.attempts[0].given_back_ms
    assert given_back_ms is not None
    assert given_back_ms <= int(at_ms)

    # the host to join again, and none of its stale output to be published.
    roster = plant.wait_for_workers(2)
    assert victim not in roster
    answers = check_exact(plant, requests)
    assert all(len(answer.results) == 1 for answer in answers)
    assert attempts(answers) == [2 if one in rescued else 1 for one in requests]
    assert controller.children() == stalled[1:], "the warm process goes on under a new name"
    served = {answer.result.provenance.worker for answer in check_serves(plant, 4)}
    assert served == set(roster)


@pytest.mark.long
def test_request_that_loses_every_worker_is_given_up(plant: Plant) -> None:
    # Given a request whose workers are always killed
    plant.coordinator(max_crashes=1, max_lost_alone=2)
    plant.worker(simulated_step_s=STEP_S, crash_point="before_step", backoff_s=0.05)
    plant.wait_for_workers(1)
    request = make_request()
    plant.push(request)

    # I expect it to fail after it loses two more workers while it runs alone.
    result = plant.result(request.id)
    assert (result.status, result.error.code) == ("failed", "POISONED")
    assert "SIGKILL" in result.error.message
    assert plant.ledger(request.id)["crashes"] == "3"
    assert [letter["id"] for letter in dead_letters(plant)] == [request.id]
