"""Rates between two looks at a yard, and its history as its readers join it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.snapshots import make_snapshot, make_view_worker
from tokenyard.protocol.leader_reports import HistorySample
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.telemetry.metrics import BUCKETS_S, quantile_s, trimmed
from tokenyard.yard.history import (
    MAX_SNAPSHOTS,
    OLDEST_MS,
    SMOOTH_MS,
    RecentSamples,
    Snapshot,
    SnapshotHistory,
    Throughput,
    by_time,
    joined,
    lately,
    rates_between,
)


def look(at_ms: int, **totals: float) -> Snapshot:
    """A snapshot of a yard with one worker, which has done so much."""
    return make_snapshot(at_ms, [make_view_worker("a.1", WorkerTotals(**totals))])


def test_rates_are_what_was_done_since() -> None:
    before = look(0, finished=10, tokens=100)
    now = make_snapshot(
        2000,
        [
            make_view_worker("a.1", WorkerTotals(finished=14, tokens=300, ttft_ms=20.0)),
            make_view_worker(
                "b.2", WorkerTotals(finished=1, tokens=50, ttft_ms=40.0), model="other"
            ),
        ],
    )

    rates = rates_between(before, now)

    # I expect that one that has joined since has done all that it says since then
    assert rates.workers == {"a.1": Throughput(2.0, 100.0), "b.2": Throughput(0.5, 25.0)}
    assert rates.models == {"adder": Throughput(2.0, 100.0), "other": Throughput(0.5, 25.0)}
    assert rates.yard == Throughput(2.5, 125.0)
    assert rates.ttft_ms == 30.0
    assert rates.seconds == 2.0


def test_rates_after_a_worker_reset_its_counter() -> None:
    before = look(0, finished=10, tokens=100)
    now = look(1000, finished=3, tokens=40)

    assert rates_between(before, now).yard == Throughput(3.0, 40.0)


def test_rates_of_simultaneous_snapshots() -> None:
    snapshot = look(0)

    assert rates_between(snapshot, snapshot).yard == Throughput()


@pytest.mark.parametrize("times", [[0], [5000, 1000]], ids=["one", "clock set back"])
def test_less_than_two_snapshots_have_no_rates(times: list[int]) -> None:
    history = SnapshotHistory()
    assert history.last is None
    for at_ms in times:
        history.add(make_snapshot(at_ms))

    assert history.rates() is None


def test_rates_are_taken_over_some_seconds() -> None:
    # Given a worker that says every two seconds what it has done, and looks each second
    history = SnapshotHistory()
    for second in range(10):
        history.add(look(1000 * second, tokens=second // 2))

    assert history.rates().seconds == SMOOTH_MS / 1000

    # If the looks are far apart, I expect the time since the last one
    history.add(make_snapshot(60_000))
    assert history.rates().seconds == 51.0


def test_history_is_limited() -> None:
    history = SnapshotHistory()
    for number in range(2 * MAX_SNAPSHOTS):
        history.add(make_snapshot(number, waiting=number))

    last = 2 * MAX_SNAPSHOTS
    assert history.depths("low", 3) == [last - 3, last - 2, last - 1]
    assert len(history.depths("low", 9 * MAX_SNAPSHOTS)) == MAX_SNAPSHOTS


# Samples


@pytest.fixture
def samples() -> RecentSamples[int]:
    return RecentSamples(span_ms=10_000, apart_ms=1_000, least_ms=1_000)


def test_a_look_is_compared_with_the_oldest_of_the_last_seconds(
    samples: RecentSamples[int],
) -> None:
    assert samples.add("a", 0, 100) is None
    assert samples.add("b", 500, 7) is None
    assert samples.add("a", 500, 200) is None  # too early to say
    assert samples.add("a", 2_000, 300) == (2.0, 100)
    for second in range(3, 60):
        last = samples.add("a", 1000 * second, second)
    assert last == (10.0, 49)


def test_looks_close_to_each_other_share_one(samples: RecentSamples[int]) -> None:
    for at_ms in range(0, 60_000, 10):
        samples.add("a", at_ms, at_ms)
    assert samples.add("a", 60_000, 0) == (10.0, 50_000)
    assert len(samples._seen["a"]) == 11


def test_after_a_pause_the_last_look_counts_and_an_old_one_not_at_all(
    samples: RecentSamples[int],
) -> None:
    samples.add("a", 0, 1)
    samples.add("a", 2_000, 2)
    assert samples.add("a", 92_000, 3) == (90.0, 2)
    assert samples.add("a", 92_001 + OLDEST_MS, 4) is None


def test_a_clock_that_was_set_back_begins_again(samples: RecentSamples[int]) -> None:
    samples.add("a", 10 * OLDEST_MS, 1)
    assert samples.add("a", 0, 2) is None
    assert samples.add("a", 1_000, 3) == (1.0, 2)


def test_looks_keep_a_bounded_number_of_things(samples: RecentSamples[int]) -> None:
    for number in range(2_000):
        samples.add(number, 0, 1)
    assert samples.add(0, 3_000, 2) is None
    assert samples.add(1_999, 2_000, 2) == (2.0, 1)


# The leaders' history


def sample(at_s: float, **fields: Any) -> HistorySample:
    values = {"at_ms": int(1000 * at_s), "waiting": {}, "seconds": 10.0}
    return HistorySample(**(values | fields))


def test_what_ended_is_added_and_what_was_there_is_the_newest() -> None:
    first = sample(10, finished=3, tokens=30, running=9, ttft=[1, 2], waiting={"high": 4})
    second = sample(20, finished=5, tokens=10, running=2, ttft=[0, 0, 1], seconds=5.0)

    both = joined([first, second])
    assert both is not None
    assert (both.at_ms, both.seconds, both.finished, both.tokens) == (20_000, 15.0, 8, 40)
    assert (both.running, both.waiting, both.ttft) == (2, {}, [1, 2, 1])
    assert joined([]) is None


def test_steps_are_whole_and_those_without_an_entry_are_gaps() -> None:
    # An entry at 60 s is about the ten seconds before, and so of the step from 30 to 60
    samples = [sample(at) for at in (10.1, 20.1, 30.1, 60.1, 120.1)]

    steps = by_time(samples, 133_000, 30_000, 150_000)

    assert [one and one.seconds for one in steps] == [30.0, 10.0, None, 10.0, None]
    # a later look shows the same until there should be an entry of the next step.
    assert by_time(samples, 161_000, 30_000, 150_000) == steps
    assert by_time(samples, 163_000, 30_000, 150_000) == [*steps[1:], None]


def test_now_is_the_last_minute() -> None:
    samples = [sample(at, finished=at) for at in range(10, 130, 10)]

    now = lately(samples, 125_000)
    assert now is not None
    assert now.finished == sum(range(60, 130, 10))
    assert lately(samples, 1_000_000) is None


@pytest.mark.parametrize(
    ("times", "share", "expected"),
    [
        ([], 0.5, None),
        ([0.3] * 10, 0.5, 0.375),  # within 0.25 to 0.5, as Prometheus puts it
        ([0.3] * 98 + [9.0] * 2, 0.5, 0.25 + 0.25 * 50 / 98),
        ([0.3] * 98 + [9.0] * 2, 0.99, 7.5),
        ([1000.0], 0.5, BUCKETS_S[-1]),
    ],
)
def test_quantiles_are_those_of_prometheus(
    times: list[float], share: float, expected: float | None
) -> None:
    counts = [0] * (len(BUCKETS_S) + 1)
    for time in times:
        counts[next((at for at, le in enumerate(BUCKETS_S) if time <= le), len(BUCKETS_S))] += 1

    found = quantile_s(trimmed(counts), share)
    assert found == (expected if expected is None else pytest.approx(expected))
