"""Rates between two looks at a yard, and its history."""

from __future__ import annotations

from tests.support.looks import make_look, make_view_worker
from tokenyard.admin.history import MOST_LOOKS, SMOOTH_MS, Rate, SnapshotHistory, rates_between
from tokenyard.protocol.worker_info import WorkerTotals


def test_rates_are_what_was_done_since() -> None:
    before = make_look(0, [make_view_worker("a.1", WorkerTotals(finished=10, tokens=100))])
    now = make_look(
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
    assert rates.workers == {"a.1": Rate(2.0, 100.0), "b.2": Rate(0.5, 25.0)}
    assert rates.models == {"adder": Rate(2.0, 100.0), "other": Rate(0.5, 25.0)}
    assert rates.yard == Rate(2.5, 125.0)
    assert rates.ttft_ms == 30.0
    assert rates.seconds == 2.0


def test_a_count_that_went_down_has_begun_anew() -> None:
    before = make_look(0, [make_view_worker("a.1", WorkerTotals(finished=10, tokens=100))])
    now = make_look(1000, [make_view_worker("a.1", WorkerTotals(finished=3, tokens=40))])

    assert rates_between(before, now).yard == Rate(3.0, 40.0)


def test_two_looks_at_the_same_moment_divide_by_no_zero() -> None:
    look = make_look(0, [make_view_worker("a.1", WorkerTotals())])

    assert rates_between(look, look).yard == Rate()


def test_one_look_has_no_rates() -> None:
    looks = SnapshotHistory()
    assert looks.last is None
    looks.add(make_look(0))

    assert looks.rates() is None


def test_rates_are_taken_over_some_seconds() -> None:
    # Given a worker that says every two seconds what it has done, and looks each second
    looks = SnapshotHistory()
    for second in range(10):
        looks.add(
            make_look(1000 * second, [make_view_worker("a.1", WorkerTotals(tokens=second // 2))])
        )

    rates = looks.rates()
    assert rates
    assert rates.seconds == SMOOTH_MS / 1000

    # If the looks are far apart, I expect the time since the last one
    looks.add(make_look(60_000))
    rates = looks.rates()
    assert rates
    assert rates.seconds == 51.0


def test_a_clock_that_was_set_back_begins_anew() -> None:
    looks = SnapshotHistory()
    looks.add(make_look(5000))
    looks.add(make_look(1000))

    assert looks.rates() is None


def test_the_history_of_an_intake_is_bounded() -> None:
    looks = SnapshotHistory()
    for number in range(2 * MOST_LOOKS):
        looks.add(make_look(number, waiting=number))

    assert looks.depths("low", 3) == [2 * MOST_LOOKS - 3, 2 * MOST_LOOKS - 2, 2 * MOST_LOOKS - 1]
    assert len(looks.depths("low", 9 * MOST_LOOKS)) == MOST_LOOKS
