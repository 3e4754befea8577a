"""The coordinator's counts."""

from __future__ import annotations

from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard.telemetry.metrics import BUCKETS_S


def test_a_value_at_a_bound_is_within() -> None:
    counts = CoordinatorCounts()
    for seconds in (0.0, 0.001, 240.0, 241.0):
        counts.assign.observe(seconds)

    assert counts.assign.counts == [2, *[0] * (len(BUCKETS_S) - 2), 1, 1]
