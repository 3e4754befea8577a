"""Rates between two looks at a yard, and its history."""

from __future__ import annotations

import pytest

from tests.support.snapshots import make_snapshot, make_view_worker
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.yard.history import (
    MAX_SNAPSHOTS,
    OLDEST_MS,
    SMOOTH_MS,
    RecentSamples,
    Snapshot,
    SnapshotHistory,
    Throughput,
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

    rates = history.rates()
    assert rates.seconds == SMOOTH_MS / 1000

    # If the looks are far apart, I expect the time since the last one
    history.add(make_snapshot(60_000))
    rates = history.rates()
    assert rates.seconds == 51.0


def test_history_is_limited() -> None:
    history = SnapshotHistory()
    for number in range(2 * MAX_SNAPSHOTS):
        history.add(make_snapshot(number, waiting=number))

    assert history.depths("low", 3) == [
        2 * MAX_SNAPSHOTS - 3,
        2 * MAX_SNAPSHOTS - 2,
        2 * MAX_SNAPSHOTS - 1,
    ]
    assert len(history.depths("low", 9 * MAX_SNAPSHOTS)) == MAX_SNAPSHOTS


# Samples


def test_a_look_is_compared_with_the_oldest_of_the_last_seconds() -> None:
    samples = RecentSamples[int](span_ms=10_000, apart_ms=1_000, least_ms=1_000)
    assert samples.add("a", 0, 100) is None
    assert samples.add("b", 500, 7) is None
    assert samples.add("a", 500, 200) is None  # too early to say
    assert samples.add("a", 2_000, 300) == (2.0, 100)
    for second in range(3, 60):
        last = samples.add("a", 1000 * second, second)
    assert last == (10.0, 49)


def test_looks_close_to_each_other_share_one() -> None:
    samples = RecentSamples[int](span_ms=10_000, apart_ms=1_000, least_ms=1_000)
    for at_ms in range(0, 60_000, 10):
        samples.add("a", at_ms, at_ms)
    assert samples.add("a", 60_000, 0) == (10.0, 50_000)
    assert len(samples._seen["a"]) == 11


def test_after_a_pause_the_last_look_counts_and_an_old_one_not_at_all() -> None:
    samples = RecentSamples[int](span_ms=10_000, apart_ms=1_000, least_ms=1_000)
    samples.add("a", 0, 1)
    samples.add("a", 2_000, 2)
    assert samples.add("a", 92_000, 3) == (90.0, 2)
    assert samples.add("a", 92_001 + OLDEST_MS, 4) is None


def test_a_clock_that_was_set_back_begins_again() -> None:
    samples = RecentSamples[int](span_ms=10_000, apart_ms=1_000, least_ms=1_000)
    samples.add("a", 10 * OLDEST_MS, 1)
    assert samples.add("a", 0, 2) is None
    assert samples.add("a", 1_000, 3) == (1.0, 2)


def test_looks_keep_a_bounded_number_of_things() -> None:
    samples = RecentSamples[int](span_ms=10_000, apart_ms=1_000, least_ms=1_000)
    for number in range(2_000):
        samples.add(number, 0, 1)
    assert samples.add(0, 3_000, 2) is None
    assert samples.add(1_999, 2_000, 2) == (2.0, 1)
