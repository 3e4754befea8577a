"""The end of a job: requests of a slow worker are also sent to an idle one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batch.conftest import WriteLines, completion, objects
from tests.batch.running import batch
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.admin.signals import Signals
from tokenyard.batch.hedging import Hedges
from tokenyard.protocol.control import Order, worker_scope


@pytest.fixture
def two_workers(valkey_broker: Server) -> Iterator[Plant]:
    """A yard of two workers, ``slow`` and ``quick``."""
    with Plant(valkey_broker.url) as plant:
        plant.coordinator()
        plant.worker(name="slow")
        plant.worker(name="quick")
        plant.wait_for_workers(2)
        yield plant


@pytest.mark.long
def test_copy_replaces_the_request_of_a_slow_worker(
    two_workers: Plant, write_lines: WriteLines, tmp_path: Path
) -> None:
    # Given a worker that takes requests and makes no progress
    (process,) = two_workers.programs[1].children()
    process.send_signal(signal.SIGSTOP)
    source = write_lines("in.jsonl", [completion(number) for number in range(4)])
    target = tmp_path / "out.jsonl"

    done = batch(two_workers, "run", source, "-o", target)

    # I expect one answer for each line while the slow worker still holds its requests.
    assert done.returncode == 0, done.stderr
    assert sorted(line["custom_id"] for line in objects(target)) == [
        f"line-{number}" for number in range(4)
    ]
    assert process.status() == "stopped"
    (held,) = (name for name, info in two_workers.roster().items() if info.name == "slow")
    assert two_workers.connection.xlen(two_workers.keys.lane(held))


def test_paused_worker_gets_no_hedged_copies(two_workers: Plant) -> None:
    keys = two_workers.keys
    with (
        Client(two_workers.url, yard=keys.yard) as client,
        Hedges(client, two_workers.url, keys.yard, {}) as hedges,
    ):

        def idle() -> set[str]:
            return {one.info.name for one in hedges._idle_workers() if one.info}

        eventually(lambda: idle() == {"slow", "quick"})
        signals = Signals(two_workers.connection, keys)
        paused = signals.give(Order(signal="PAUSE", scope=worker_scope("quick")))
        assert signals.wait(paused, 30.0) == []

        assert idle() == {"slow"}
