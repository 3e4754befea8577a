"""The history as its readers join it: by minutes, and to what there is now."""

from __future__ import annotations

from typing import Any

import pytest

from tokenyard.protocol.leader_reports import HistorySample
from tokenyard.telemetry.metrics import BUCKETS_S, quantile_s, trimmed
from tokenyard.yard.history import by_time, joined, lately


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
