"""Every process is replaced, one after another, under load: no request is disturbed."""

from __future__ import annotations

import pytest

from tests.support.processes import Plant
from tests.support.streams import attempts, check_exact, streams
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request

pytestmark = pytest.mark.crash


@pytest.mark.long
def test_rolling_restart_of_every_process_disturbs_no_stream(plant: Plant) -> None:
    # Given two coordinators and two hosts under load
    coordinators = [plant.coordinator(name=f"c{n}") for n in range(2)]
    hosts = [
        plant.worker(name=f"h{n}", simulated_step_s=0.02, max_num_seqs=8, grace_s=0.5)
        for n in range(2)
    ]
    plant.wait_for_workers(2)
    sent: list[Request] = []

    def load(max_tokens: int = 60) -> None:
        """More streams, the first of which run."""
        more = streams(20, max_tokens)
        sent.extend(more)
        plant.push_all(more)
        eventually(lambda: plant.replies(more[0].id), timeout_s=30.0)

    # If each is stopped gracefully while its successor starts
    for number, host in enumerate(hosts):
        plant.worker(name=f"new{number}", simulated_step_s=0.02, max_num_seqs=8)
        plant.wait_for_workers(3)
        load(200)
        assert host.stop() == 0
    for number, coordinator in enumerate(coordinators):
        plant.coordinator(name=f"d{number}")
        load()
        assert coordinator.stop() == 0
    load()

    # I expect every token once, and no crash or fault counted.
    answers = check_exact(plant, sent)
    assert 1 < max(attempts(answers)) <= 1 + len(hosts), "some were handed back in the middle"
    ledgers = [plant.ledger(one.id) for one in sent]
    assert not any("crashes" in ledger or "faults" in ledger for ledger in ledgers)
    assert not plant.connection.exists(plant.keys.dead)
