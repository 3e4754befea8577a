"""Real processes beside a broker whose clock is set by an hour while requests run and wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.set_server import SetServer
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request, SamplingParams

pytestmark = [pytest.mark.crash, pytest.mark.long, pytest.mark.timeout(300)]

HOUR_S: Final = 3600
LENGTH: Final = 150


@pytest.fixture
def server(no_leftover_processes: None, tmp_path: Path) -> Iterator[SetServer]:
    running = SetServer(tmp_path)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def plant(server: SetServer) -> Iterator[Plant]:
    """Two coordinators and a worker with room for half of the requests."""
    with Plant(server.url) as started:
        for name in ("one", "two"):
            started.coordinator(name=name, lease_ms=6_000)
        started.worker(simulated_step_s=0.05, max_num_seqs=4)
        started.wait_for_workers(1)
        yield started


def ask(plant: Plant) -> list[Request]:
    """Eight streams with deadlines in ten minutes, of which four run."""
    now_ms = 1000 * plant.connection.time()[0]
    requests = [
        make_request(
            f"r{number}",
            stream=True,
            params=SamplingParams(max_tokens=LENGTH),
            deadline_ms=now_ms + 600_000,
        )
        for number in range(8)
    ]
    plant.push_all(requests)
    eventually(lambda: sum(plant.published(one.id) > 3 for one in requests) == 4)
    return requests


def check(plant: Plant, requests: list[Request]) -> set[int]:
    """Each has all of its tokens; the attempts that this took."""
    attempts = set()
    for request, result in zip(requests, plant.results(requests), strict=True):
        assert result.ok, (request.id, result)
        assert len(result.tokens) == LENGTH
        assert result.provenance is not None
        attempts.add(result.provenance.attempt)
    return attempts


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["ahead", "back"])
def test_no_request_ends_and_none_is_repeated(
    plant: Plant, server: SetServer, ahead_s: int
) -> None:
    requests = ask(plant)
    server.set_clock(ahead_s)
    assert check(plant, requests) == {1}
    more = [make_request("more", params=SamplingParams(max_tokens=3))]
    plant.push_all(more)
    assert plant.results(more)[0].ok


def lose_host(plant: Plant) -> None:
    """A host vanishes with its workers; another comes."""
    plant.programs[2].end()
    plant.worker(name="other", max_num_seqs=4)


def lose_leader(plant: Plant) -> None:
    token = plant.wait_for_leader().decode()
    (leader,) = (one for one in plant.programs if f"leads as {token}" in one.log)
    leader.kill()


@pytest.mark.parametrize("lose", [lose_host, lose_leader])
def test_who_vanishes_behind_a_step_back_is_replaced(
    plant: Plant, server: SetServer, lose: Callable[[Plant], None]
) -> None:
    """Not an hour later, when its lease would be over by the broker's clock."""
    requests = ask(plant)
    server.set_clock(-HOUR_S)
    lose(plant)
    check(plant, requests)
