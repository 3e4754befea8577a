"""The server restarts without its last writes, as after a power failure or on a late replica.

A copy of its folder plays the state of its disk.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.servers import Server, find_binary
from tests.support.streams import attempts, begun, check_exact, check_serves
from tests.support.waiting import eventually
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.scripts import Scripts

pytestmark = pytest.mark.crash

STEP_S = 0.05
TOKENS = 100


@pytest.fixture
def plant(own_broker: Server) -> Iterator[Plant]:
    with Plant(own_broker.url) as started:
        yield started


def folder_of(server: Server) -> Path:
    return server._log.parent


def copy_at_rest(plant: Plant, server: Server, copy: Path, running: Request) -> None:
    """Copy the server's folder while this request has not ended."""
    pids = [info.pid for info in plant.roster().values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    shutil.copytree(folder_of(server), copy)
    assert plant.ledger(running.id)["state"] == "assigned"
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def put_back(server: Server, copy: Path) -> None:
    """Kill the server, and start it from the copy."""
    server.kill()
    shutil.rmtree(folder_of(server))
    shutil.copytree(copy, folder_of(server))
    server.start()


def become_another_server(copy: Path, name: str, keys: Keys) -> None:
    """Change the copy: a leader has seen a replica take over, and has revoked all leases."""
    binary = find_binary(name)  # type: ignore[arg-type]
    assert binary
    other = Server(name, binary, copy, aof=True)  # type: ignore[arg-type]
    other.start()
    with redis.Redis.from_url(other.url) as connection:
        token = connection.get(keys.leader).decode()
        assert Scripts(Yard(connection, keys)).recognize(token, "another", was_replica=True) == 1
    other.stop()


def raw_result(plant: Plant, request: Request) -> bytes | None:
    packed: bytes | None = plant.connection.hget(
        plant.keys.ledger(request.client, request.id), "result"
    )
    return packed


@pytest.mark.long
@pytest.mark.parametrize(("is_fenced", "attempt"), [(False, "1"), (True, "2")])
def test_a_result_lost_by_the_server_is_published_again(
    plant: Plant, own_broker: Server, tmp_path: Path, is_fenced: bool, attempt: str
) -> None:
    # Given a request that the server's disk shows on a lane
    plant.up(simulated_step_s=STEP_S)
    [worker] = plant.roster()
    request = make_request(params=SamplingParams(max_tokens=TOKENS))
    plant.push(request)
    eventually(lambda: plant.ledger(request.id).get("state") == "assigned")
    copy = tmp_path / "copy"
    copy_at_rest(plant, own_broker, copy, request)
    if is_fenced:
        become_another_server(copy, own_broker.name, plant.keys)

    # If its result is published and read, and then power fails
    first = plant.result(request.id)
    before = eventually(lambda: raw_result(plant, request))
    put_back(own_broker, copy)

    # I expect the same result again, with the times of the first,
    again = plant.result(request.id)
    assert again == first
    assert raw_result(plant, request) == before
    assert again.timing
    # from a worker that kept its lease or from its next incarnation,
    assert plant.ledger(request.id)["attempt"] == attempt
    assert (worker in plant.wait_for_workers(1)) is not is_fenced
    # and an empty lane.
    assert [plant.connection.xlen(plant.keys.lane(name)) for name in plant.roster()] == [0]
    check_serves(plant)


@pytest.mark.long
def test_streams_continue_after_the_tokens_that_the_server_kept(
    plant: Plant, own_broker: Server, tmp_path: Path
) -> None:
    # Given streams that published more tokens than the server's disk holds
    plant.up(simulated_step_s=STEP_S)
    requests = begun(plant, 3, max_tokens=200)
    copy = tmp_path / "copy"
    copy_at_rest(plant, own_broker, copy, requests[0])
    seen = [plant.published(one.id) for one in requests]
    eventually(lambda: all(plant.published(one.id) > seen[n] for n, one in enumerate(requests)))

    # If power fails
    put_back(own_broker, copy)

    # I expect each to be handed back, and to be complete in the end.
    answers = check_exact(plant, requests)
    assert attempts(answers) == [2, 2, 2]
    assert {plant.ledger(one.id).get("crashes") for one in requests} == {None}
