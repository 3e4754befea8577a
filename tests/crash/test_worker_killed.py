"""Worker processes and controllers that die or stall: what they held finishes elsewhere, exactly.

The engine is the simulated one, so every answer is known: it follows from the request alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest

from tests.support.builders import make_assignment, make_request
from tests.support.processes import Answer, Plant
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.wire import Request, SamplingParams
from worker.engines import Finished
from worker.engines.simulated import SimulatedEngine

pytestmark = pytest.mark.crash

STEP_S = 0.02
TOKENS = 60


@pytest.fixture
def plant(valkey_broker: Server) -> Iterator[Plant]:
    with Plant(valkey_broker.url) as started:
        yield started


def streams(count: int, max_tokens: int = TOKENS) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens)
    return [make_request(tokens=[n + 1, n + 2], stream=True, params=params) for n in range(count)]


def expected(request: Request) -> list[int]:
    """The tokens that an engine which nobody kills makes of a request."""
    engine = SimulatedEngine("sim")
    engine.add(make_assignment(request))
    while True:
        for event in engine.step():
            if isinstance(event, Finished):
                return list(event.choices[0].tokens)


def check_exact(plant: Plant, requests: Sequence[Request]) -> list[Answer]:
    """Each stream has one result, and every token that it would have had without any crash."""
    plant.results(requests)
    answers = [plant.answer(request.id) for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        assert answer.result.ok, answer.result.error
        assert answer.result.tokens == expected(request)
        answer.check_stream()
    return answers


def attempts(answers: Sequence[Answer]) -> list[int]:
    return [answer.result.provenance.attempt for answer in answers]


def wait_mid_stream(plant: Plant, requests: Sequence[Request], least: int = 3) -> None:
    """All of them run and have published some tokens."""
    eventually(lambda: all(plant.published(request.id) >= least for request in requests))


def held_by(plant: Plant, requests: Sequence[Request], worker: str) -> list[Request]:
    return [one for one in requests if plant.ledger(one.id).get("worker") == worker]


def test_killed_worker_mid_stream(plant: Plant) -> None:
    # Given two worker processes in the middle of eight streams
    plant.coordinator()
    plant.worker(slots=2, simulated_step_s=STEP_S)
    workers = plant.wait_for_workers(2)
    requests = streams(8)
    plant.push_all(requests)
    wait_mid_stream(plant, requests)
    victim = next(iter(workers))
    rescued = held_by(plant, requests, victim)
    assert 0 < len(rescued) < 8

    # If one of them is killed
    os.kill(workers[victim].pid, signal.SIGKILL)

    # I expect the same tokens as without, a second attempt for its requests alone,
    answers = check_exact(plant, requests)
    assert attempts(answers) == [2 if one in rescued else 1 for one in requests]
    assert {plant.ledger(one.id)["crashes"] for one in rescued} == {"1"}
    # and the process started again, under a new incarnation.
    roster = plant.wait_for_workers(2)
    assert victim not in roster
    assert {info.name for info in roster.values()} == {"w-0", "w-1"}
