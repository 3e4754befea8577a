"""How `benchmarks/scale` evaluates its measurements; its quick run tests the yards."""

from __future__ import annotations

import pytest

from benchmarks.measure import Latencies, Throughput
from benchmarks.scale import backlog as scale_backlog
from benchmarks.scale import map as scale_map
from benchmarks.scale import workers as scale_workers
from benchmarks.scale.backlog import Depth
from benchmarks.scale.targets import Figures, Part, missed
from benchmarks.scale.workers import Run

GOOD = {"bytes_beyond_payload": 390.0, "dispatch_ratio": 0.95, "submit_ratio": 1.02}


def throughput(coordinator_s: float, seconds: float = 10.0) -> Throughput:
    return Throughput(1000, seconds, {"coordinator": coordinator_s, "broker": 0.2})


def test_a_request_does_not_pay_for_the_cost_of_each_second() -> None:
    """Given a coordinator that takes a hundredth of each second, I expect the rest to count."""
    run = Run(throughput(0.15), throughput(0.3, 20.0), {"coordinator": 0.01, "broker": 0.0}, 1.0)

    found = scale_workers.figures([run])

    assert found["full_us_coordinator"] == pytest.approx(50)
    assert found["spread_us_coordinator"] == pytest.approx(100)
    assert found["full_us"] == pytest.approx(250)
    assert found["idle_ms_coordinator"] == pytest.approx(10)


def test_a_backlog_is_compared_with_the_empty_yard_of_its_round() -> None:
    slow, fast = throughput(0.2, 20.0), throughput(0.1, 10.0)
    ones, twos = Latencies([1.0] * 10), Latencies([2.0] * 10)
    drains = [(slow, slow), (fast, fast), (fast, slow)]
    depth = Depth(1000, 300.0, (slow, fast), drains, [(twos, ones)])

    found = scale_backlog.figures(depth)

    assert found["dispatch_ratio"] == 1.0
    assert (found["first_dispatch_ratio"], found["first_us_ratio"]) == (0.5, pytest.approx(4 / 3))
    assert found["submit_ratio"] == 2.0
    assert found["bytes_beyond_payload"] == 300.0


def test_growing_memory_is_reported_by_process() -> None:
    looks = [{"client": 100, "broker": 50}, {"client": 90, "broker": 70}]
    looks.append({"client": 100, "broker": 75})

    assert scale_map.grown(looks) == {"client": 1.0, "broker": 1.5}


@pytest.mark.parametrize(
    ("part", "figures"),
    [
        (
            "workers",
            {"2": {"full_us": 9, "spread_us": 9}, "1000": {"full_us": 11, "spread_us": 99}},
        ),
        ("backlog", {"1000000": GOOD}),
        ("map", {"grown": {"client": 1.0, "broker": 1.05}}),
        ("yards", {"8": {"ratio": 1.0}}),
        ("clients", {"2000": {"us_broker": 500.0}}),
    ],
)
def test_met_targets_are_no_faults(part: Part, figures: Figures) -> None:
    assert missed(part, figures) == []


@pytest.mark.parametrize(
    ("part", "figures"),
    [
        ("workers", {"2": {"full_us": 9, "spread_us": 9}, "1000": {"full_us": 12, "spread_us": 9}}),
        ("backlog", {"1000000": GOOD | {"bytes_beyond_payload": 401.0}}),
        ("backlog", {"1000000": GOOD | {"dispatch_ratio": 0.8}}),
        ("backlog", {"1000000": GOOD | {"submit_ratio": 1.2}}),
        ("map", {"grown": {"client": 1.2, "broker": 1.0}}),
        ("yards", {"8": {"ratio": 0.9}}),
        # Nothing to compare with is no success.
        ("workers", {"2": {"full_us": 100, "spread_us": 99}}),
    ],
)
def test_missed_targets_are_reported(part: Part, figures: Figures) -> None:
    assert len(missed(part, figures)) == 1
