"""Every process is replaced, one after another, under load: no request is disturbed."""

from __future__ import annotations

import pytest

from tests.support.processes import Plant
from tests.support.streams import attempts, begun, check_beginning, check_exact, streams
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request

pytestmark = pytest.mark.crash


@pytest.mark.long
def test_rolling_restart_of_every_process_disturbs_no_stream(plant: Plant) -> None:
    # Given two coordinators and two hosts under load,
    coordinators = [plant.coordinator(name=f"c{n}") for n in range(2)]
    hosts = [
        plant.worker(name=f"h{n}", simulated_step_s=0.02, max_num_seqs=8, grace_s=0.5)
        for n in range(2)
    ]
    plant.wait_for_workers(2)
    # among which are streams that are longer than all of it,
    long = begun(plant, 4, max_tokens=8000)
    sent: list[Request] = []

    def load() -> None:
        """More streams, the first of which run."""
        more = streams(20, max_tokens=60)
        sent.extend(more)
        plant.push_all(more)
        eventually(lambda: plant.replies(more[0].id))

    # if each is stopped gracefully while its successor starts
    for number, host in enumerate(hosts):
        plant.worker(name=f"new{number}", simulated_step_s=0.02, max_num_seqs=8)
        plant.wait_for_workers(3)
        load()
        assert host.stop() == 0
    for number, coordinator in enumerate(coordinators):
        plant.coordinator(name=f"d{number}")
        load()
        assert coordinator.stop() == 0
    load()

    # I expect every token once, and no crash or fault counted.
    answers = check_exact(plant, sent)
    assert max(attempts(answers)) <= 1 + len(hosts)
    for one in long:
        plant.scripts.cancel(one.client, one.id, "the test has seen enough")
        check_beginning(plant, one)
    again = [int(plant.ledger(one.id)["attempt"]) for one in long]
    assert 1 < max(again) <= 1 + len(hosts), "some were handed back in the middle"
    ledgers = [plant.ledger(one.id) for one in [*sent, *long]]
    assert not any("crashes" in ledger or "faults" in ledger for ledger in ledgers)
    assert not plant.connection.exists(plant.keys.dead)
