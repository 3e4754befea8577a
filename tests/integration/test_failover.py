"""A replica that lacks the last writes becomes the master: accepted requests still end once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.servers import ServerName
from tests.support.streams import check_exact, check_handles, streams
from tests.support.waiting import eventually
from tests.support.watched import Keep, Watched
from tokenyard import Client
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.keys import INTAKE_CLASSES
from tokenyard.protocol.wire import Request
from tokenyard.scripts.answers import Submitted

AWAY_S = 60.0
#: As many as run at once, and as many as wait.
RUNNING, WAITING = 8, 16
#: Prompts of streams that a client reads.
HEARD = [[20 + n, 30 + n] for n in range(4)]


@pytest.fixture(params=["valkey", "redis"])
def watched(request: pytest.FixtureRequest, keep: Keep, tmp_path: Path) -> Watched:
    name: ServerName = request.param
    return Watched(name, tmp_path, keep)


def submit(plant: Plant, requests: Sequence[Request]) -> None:
    accepted = plant.scripts.submit("normal", requests)
    assert all(one.code is Submitted.ACCEPTED for one in accepted)


def ended(plant: Plant, requests: Sequence[Request]) -> list[str]:
    """The states of those that have ended."""
    states = [plant.ledger(one.id).get("state", "") for one in requests]
    return [state for state in states if state not in ("", "waiting", "assigned")]


@pytest.fixture
def plant(watched: Watched) -> Iterator[Plant]:
    """A coordinator and a worker that find the server by its Sentinel."""
    with Plant(watched.master.url_of("default")) as started:
        started.coordinator(redis_url=watched.url("coordinator"))
        options = {"simulated_step_s": 0.02, "max_num_seqs": RUNNING}
        started.worker(redis_url=watched.url("worker"), **options)
        started.wait_for_workers(1)
        yield started


@pytest.mark.long
def test_requests_known_to_the_replica_end_exactly_once(watched: Watched, plant: Plant) -> None:
    # Given running streams, some nearly done, waiting ones, and a request without a stream
    short, long = streams(RUNNING - 1, 200), streams(WAITING, 200)
    whole = make_request(tokens=[7, 8], params=long[0].params)
    requests = [*short, whole, *long]
    with Client(watched.url("client"), plant.keys.yard, client_id="client") as client:
        submit(plant, requests)
        handles = client.submit_many(HEARD, priority_class="high", max_tokens=150, stream=True)
        eventually(lambda: all(plant.published(one.id) >= 3 for one in short))

        # If the replica gets nothing from then on, while some of them end, others begin and go
        # on, and one more is accepted,
        watched.part()
        eventually(lambda: len(ended(plant, requests)) >= len(short))
        eventually(lambda: sum(plant.published(one.id) >= 3 for one in long) >= 3)
        unknown = make_request(params=long[0].params)
        submit(plant, [unknown])
        seen = ended(plant, requests)
        # and then becomes the master,
        watched.fail_over()
        plant.connection.close()
        plant.connection = open_connection(watched.replica.url_of("default"), timeout_s=30.0)
        assert len(ended(plant, requests)) < len(seen), "nothing was lost: no gap"

        # I expect each that it knew of to end once, with every token, without a person's help,
        check_exact(plant, requests)
        # clients that have read lost tokens to continue without a gap or a repetition,
        check_handles(handles, HEARD, 150)
        # nothing to be left behind,
        eventually(lambda: not left_behind(plant), timeout_s=AWAY_S)
        # and the one that only the old master knew to be unknown.
        assert plant.ledger(unknown.id) == {}
        assert all(program.is_running for program in plant.programs)


def left_behind(plant: Plant) -> list[str]:
    """The lanes and intakes that hold something."""
    lanes = [key.decode() for key in plant.connection.scan_iter(plant.keys.lane("*"), count=1000)]
    streams = (*lanes, *(plant.keys.intake(name) for name in INTAKE_CLASSES))
    return [stream for stream in streams if plant.connection.xlen(stream)]
