"""The history of a yard whose coordinators are replaced and killed."""

from __future__ import annotations

import pytest

from coordinator.telemetry import reports
from tests.integration.operating import Opened
from tests.support.builders import make_request, worker_json
from tests.support.lanes import LONG_MS, Lanes, requests
from tests.support.processes import Plant
from tests.support.waiting import eventually
from tokenyard.protocol.leader_reports import HistorySample
from tokenyard.protocol.streams import unix_ms
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.yard.history import read_history
from tokenyard.yard.snapshot import read_yard


class Yard(Lanes):
    """A yard whose worker counts what the test says."""

    def count(self, worker: str, **totals: int | list[int]) -> None:
        """Renew a worker's lease with these totals."""
        tally = WorkerTotals(**totals)  # type: ignore[arg-type]
        packed = worker_json(worker.rpartition(".")[0], lane_limit=9, model="sim", tally=tally)
        self.scripts.renew(LONG_MS, [(worker, packed)])

    def history(self) -> list[HistorySample]:
        return read_history(self, self.now_ms)


def history_of(plant: Plant) -> list[HistorySample]:
    return read_history(plant, unix_ms(plant.connection.time()))


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> Yard:
    monkeypatch.setattr(reports, "EVERY_MS", 400)
    monkeypatch.setattr(reports, "LEAST_MS", 50)
    return opened(Yard)


@pytest.mark.long
def test_the_leader_writes_what_it_sees(yard: Yard) -> None:
    # Given a worker that can take two requests, and four requests
    worker = yard.worker(lane_limit=2)
    yard.coordinator()
    yard.push(requests(4))
    yard.wait_for_load(worker, 2)

    # I expect entries with those running and those waiting,
    seen = eventually(lambda: [one for one in yard.history() if one.running == 2])
    assert sum(seen[-1].waiting.values()) == 2
    assert (seen[-1].workers, seen[-1].ready) == (1, 1)
    # and the waits of the two that were dispatched, once.
    eventually(lambda: sum(sum(one.wait) for one in yard.history()) == 2)

    # If the worker tells what it has done,
    yard.count(worker, finished=3, failed=1, tokens=70, ttft=[0, 2])
    # I expect that too, once.
    eventually(lambda: sum(one.finished for one in yard.history()) == 3)
    told = yard.history()
    assert sum(one.failed for one in told) == 1
    assert sum(one.tokens for one in told) == 70
    assert sum(sum(one.ttft) for one in told) == 2
    count = len(told)
    eventually(lambda: len(yard.history()) > count + 1)
    assert sum(one.finished for one in yard.history()) == 3


@pytest.mark.long
def test_a_worker_that_worked_before_the_leader_came_counts_once(yard: Yard) -> None:
    # Given a worker with work that an earlier leader has recorded
    worker = yard.worker(lane_limit=2)
    first = yard.coordinator(name="first")
    eventually(yard.history)
    yard.count(worker, finished=10, tokens=100)
    eventually(lambda: sum(one.finished for one in yard.history()) == 10)

    # If another leads, and the worker does more
    yard.coordinator(name="second")
    first.stop()
    eventually(lambda: [one for one in yard.history() if one.epoch == 2])
    yard.count(worker, finished=12, tokens=120)

    # I expect each result once.
    eventually(lambda: sum(one.finished for one in yard.history()) == 12)
    assert sum(one.tokens for one in yard.history()) == 120


def test_a_fenced_leader_writes_nothing(yard: Yard) -> None:
    # Given a leader that does not know yet that it was replaced
    leader = yard.coordinator(name="first", lease_ms=LONG_MS)
    eventually(yard.history)
    yard.connection.set(yard.keys.leader, "7:other")
    count = yard.connection.xlen(yard.keys.history)

    # I expect it to learn so when it next writes, and to have written nothing.
    eventually(lambda: leader.address().epoch == 0)
    assert yard.connection.xlen(yard.keys.history) == count


@pytest.mark.long
@pytest.mark.timeout(120)
def test_after_a_kill_the_standby_continues_the_history(plant: Plant) -> None:
    # Given a yard of processes with two coordinators, and work that was recorded
    killed = plant.coordinator(name="first", lease_ms=30_000)
    plant.wait_for_leader()
    plant.coordinator(name="second", lease_ms=30_000)
    plant.worker(simulated_step_s=0.001)
    plant.wait_for_workers(1)
    asked = requests(20)
    plant.push_all(asked)
    plant.results(asked)
    eventually(lambda: sum(one.finished for one in history_of(plant)) == 20, timeout_s=40)

    # If the leader is killed
    killed.kill()
    plant.end_lead()
    more = [make_request() for _ in range(5)]
    eventually(lambda: read_yard(plant).leader, timeout_s=20)
    eventually(lambda: [one for one in history_of(plant) if one.epoch == 2], timeout_s=40)
    plant.push_all(more)
    plant.results(more)

    # I expect the standby to continue, each request counted once.
    eventually(lambda: sum(one.finished for one in history_of(plant)) == 25, timeout_s=40)
    told = history_of(plant)
    assert {one.epoch for one in told} == {1, 2}
    assert sum(sum(one.wait) for one in told) == 25
    assert all(one.seconds >= 5 for one in told)
