"""The broker is unreachable, is out of memory, or loses its scripts, groups and connections."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.streams import attempts, check_exact, check_serves, streams, wait_mid_stream
from tests.support.waiting import eventually
from tokenyard.scripts.answers import Cancelled

pytestmark = pytest.mark.crash


@pytest.fixture
def plant(own_broker: Server) -> Iterator[Plant]:
    with Plant(own_broker.url) as started:
        yield started


@pytest.mark.parametrize("away_s", [5.0])
def test_streams_continue_after_a_broker_outage(
    plant: Plant, own_broker: Server, away_s: float
) -> None:
    # Given streams that run and streams that wait
    plant.up(slots=2, simulated_step_s=0.02, max_num_seqs=4)
    workers = plant.roster()
    requests = streams(16, max_tokens=150)
    plant.push_all(requests)
    wait_mid_stream(plant, requests[:2])

    # If the server is unreachable for some seconds
    own_broker.stop()
    back = time.monotonic() + away_s
    eventually(lambda: time.monotonic() > back, timeout_s=away_s + 5.0, every_s=0.1)
    own_broker.start()

    # I expect every stream to continue in its first attempt.
    assert set(attempts(check_exact(plant, requests))) == {1}
    assert plant.wait_for_workers(2).keys() == workers.keys()


@pytest.mark.long
def test_broker_out_of_memory_refuses_new_requests_and_completes_accepted_ones(
    plant: Plant,
) -> None:
    # Given streams that run and streams that wait
    coordinators = {name: plant.coordinator(name=name) for name in ("one", "two")}
    plant.worker(simulated_step_s=0.02, max_num_seqs=4)
    plant.wait_for_workers(1)
    requests = streams(8, max_tokens=150)
    plant.push_all(requests)
    wait_mid_stream(plant, requests[:4])

    # If the server runs out of memory, one stream is cancelled, and the leader dies
    plant.connection.config_set("maxmemory", "1mb")
    cancelled = requests.pop(0)
    assert plant.scripts.cancel("anon", cancelled.id, "enough") is Cancelled.CANCELLED
    token = plant.wait_for_leader()
    coordinators.pop(token.decode().partition(":")[2]).kill()
    plant.end_lead()

    # I expect new requests to be refused with a plain message,
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        plant.scripts.submit("normal", streams(1))
    # a standby to lead, accepted requests to complete,
    (other,) = coordinators
    eventually(lambda: plant.wait_for_leader().decode().endswith(f":{other}"))
    assert set(attempts(check_exact(plant, requests))) == {1}
    # and the yard to serve again once memory is free.
    plant.connection.config_set("maxmemory", "0")
    after = streams(2, max_tokens=5)
    plant.scripts.submit("normal", after)
    check_exact(plant, after)


@pytest.mark.long
def test_lost_scripts_and_connections_disturb_no_stream(plant: Plant) -> None:
    # Given streams that run and streams that wait
    plant.up(simulated_step_s=0.02, max_num_seqs=4)
    requests = streams(12, max_tokens=120)
    plant.push_all(requests)
    wait_mid_stream(plant, requests[:4])

    # If the scripts and all connections are lost
    plant.connection.script_flush()
    plant.connection.client_kill_filter(_type="normal", skipme=True)

    # I expect every stream to complete in its first attempt.
    assert set(attempts(check_exact(plant, requests))) == {1}
    check_serves(plant)
