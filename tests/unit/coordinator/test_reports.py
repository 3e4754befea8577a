"""What the leader writes into the history: each request once, whoever rejoins or leads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import NoPermissionError

from coordinator.roster import RosterMember
from coordinator.telemetry.counts import CoordinatorCounts
from coordinator.telemetry.reports import HistoryRecorder
from tests.support.builders import make_worker_info, stored
from tests.support.fake_clock import FakeClock
from tokenyard.clock import BrokerTime
from tokenyard.protocol.errors import Code
from tokenyard.protocol.leader_reports import HistorySample, parse_history
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.telemetry.metrics import BUCKETS_S

START_MS = 1_000_000_000.0
LEASE_MS = 2 * START_MS


class Bench:
    """A recorder with a clock, a roster and a broker of the test's own."""

    def __init__(self, fake_clock: FakeClock) -> None:
        self._clock, self._began = fake_clock, fake_clock.now
        self.written: list[HistorySample] = []
        self.refuses = False
        now_s = int(START_MS / 1000)
        self.roster: Any = SimpleNamespace(members={}, broker_time=BrokerTime())
        self.roster.broker_time.measured((now_s, 0), fake_clock.now)
        self.counts = CoordinatorCounts()
        scripts: Any = SimpleNamespace(record=self._record)
        self.recorder = HistoryRecorder(scripts, self.roster, self.counts)

    def _record(self, token: str, fields: dict[str, Any], most: int) -> None:
        if self.refuses:
            raise NoPermissionError("no permission")
        entry = f"{self.roster.broker_time.now_ms:.0f}-0"
        self.written.append(parse_history(entry, stored(fields)))

    def see(self, load: int = 0, lease_ms: float = LEASE_MS, **workers: WorkerTotals) -> None:
        """Read a roster of these workers."""
        self.roster.members = {
            worker: RosterMember(make_worker_info("w", tally=tally), lease_ms, load)
            for worker, tally in workers.items()
        }

    @property
    def seconds(self) -> float:
        return self._clock.now - self._began

    def wait(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def run(self, until_s: float, token: str = "1:ann") -> None:
        """Turns up to that second."""
        while self.seconds < until_s:
            self.wait(0.5)
            self.recorder.run_once(token)

    def watch(self, until_s: float, **seen: Any) -> None:
        """Turns up to that second, with a roster of these workers."""
        self.see(**seen)
        self.run(until_s)


@pytest.fixture
def bench(fake_clock: FakeClock) -> Bench:
    return Bench(fake_clock)


def totals(finished: int, tokens: int = 0, *ttft: int, failed: int = 0) -> WorkerTotals:
    return WorkerTotals(finished=finished, tokens=tokens, ttft=list(ttft), failed=failed)


def test_an_entry_has_what_was_added_since_the_one_before(bench: Bench) -> None:
    # Given a worker that had done something before this leader came
    bench.watch(0.5, a=totals(100, 5000, 7), load=3)
    # If it does more, with another
    bench.watch(10, a=totals(104, 5100, 7, 2), b=totals(1, 10, 1, failed=1), load=3)

    # I expect only that,
    [first] = bench.written
    assert (first.finished, first.failed, first.tokens) == (5, 1, 110)
    assert (list(first.ttft), first.running, first.workers, first.ready) == ([1, 2], 6, 2, 2)
    assert (first.epoch, first.seconds) == (1, pytest.approx(9.5))
    # and nothing in the next entry, if nothing is done any more.
    bench.run(20)
    assert (bench.written[1].finished, bench.written[1].seconds) == (0, 10.0)


def test_entries_end_at_whole_tens_of_the_servers_seconds(bench: Bench) -> None:
    bench.wait(3.0)
    bench.run(40)
    assert [one.at_ms - START_MS for one in bench.written] == [10_000, 20_000, 30_000, 40_000]


def test_what_was_watched_for_less_than_five_seconds_has_no_entry(bench: Bench) -> None:
    bench.wait(6.0)
    bench.run(20)
    assert [one.at_ms - START_MS for one in bench.written] == [20_000]


def test_a_worker_that_left_in_between_counts(bench: Bench) -> None:
    bench.watch(0.5, a=totals(1))
    bench.watch(4, a=totals(5))
    bench.watch(20)

    assert [one.finished for one in bench.written] == [4, 0]


def test_a_worker_that_began_again_counts_from_nothing(bench: Bench) -> None:
    bench.watch(0.5, a=totals(50, 500, 9))
    bench.watch(10, a=totals(2, 20, 1))

    assert (bench.written[0].finished, bench.written[0].tokens) == (2, 20)
    assert list(bench.written[0].ttft) == [1]


def test_another_term_begins_again(bench: Bench) -> None:
    # Given a leader that has lost the lead for a while in which others counted
    bench.watch(10, a=totals(10))
    bench.see(a=totals(500))
    # If it leads again,
    bench.run(20, token="3:ann")

    # I expect what it did not watch in no entry.
    assert [(one.epoch, one.finished) for one in bench.written] == [(1, 0), (3, 0)]


def test_what_the_coordinator_answers_counts(bench: Bench) -> None:
    bench.run(0.5)
    bench.counts.answered("m", "high", Code.INVALID_REQUEST, is_dead=False)
    bench.counts.answered("m", "high", Code.POISONED, is_dead=True)
    bench.counts.queue_wait["high"].observe(0.02)
    bench.counts.queue_wait["retry"].observe(0.0)
    bench.run(20)

    first, second = bench.written
    assert (first.finished, first.failed, first.dead, sum(first.wait)) == (2, 2, 1, 2)
    assert (second.finished, second.dead, list(second.wait)) == (0, 0, [])


def test_workers_without_a_lease_are_not_counted_as_workers(bench: Bench) -> None:
    bench.watch(10, a=totals(1), load=2, lease_ms=0)

    assert (bench.written[0].workers, bench.written[0].ready, bench.written[0].running) == (0, 0, 2)


def test_a_user_who_may_not_write_it_costs_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.refuses = True
    bench.run(60)

    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert bench.written == []


def test_a_count_at_a_bound_of_a_bucket_is_within() -> None:
    counts = CoordinatorCounts()
    for seconds in (0.0, 0.001, 240.0, 241.0):
        counts.assign.observe(seconds)

    assert counts.assign.counts == [2, *[0] * (len(BUCKETS_S) - 2), 1, 1]
