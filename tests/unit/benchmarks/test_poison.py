"""How the crash benchmark evaluates its observations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.poison import Crash, Poison, back_s, faults, figures, median
from benchmarks.poison_load import Heard

CRASH = Crash(per_s=100.0, back_s=1.5, restart_s=1.0, start_s=1.0, again=30, failed=0)
POISON = Poison(
    undisturbed_s=10.0,
    innocents_done_s=13.0,
    convicted_s=8.0,
    code="POISONED",
    crashes=6,
    again=20,
    failed=0,
)


def heard(*rates: int) -> Heard:
    """This many tokens in each tenth of a second."""
    return Heard(tokens=[(at / 10 + 0.01, rate) for at, rate in enumerate(rates) if rate])


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([10] * 40, 0.0),
        ([5] * 10 + [10] * 30, 0.8),
        ([0] * 20 + [9] * 20, 2.0),
        ([0] * 40, math.inf),
        ([8] * 40, math.inf),
    ],
)
def test_throughput_has_recovered_when_a_whole_second_is_as_before(
    rates: list[int], expected: float
) -> None:
    assert back_s(heard(*rates), 0.0, 100.0, 4.0) == pytest.approx(expected)


def test_innocent_requests_may_take_twice_their_time_and_six_restarts() -> None:
    found = figures(CRASH, POISON, 0)

    assert found["innocents_done_ratio"] == 0.5
    assert (found["throughput_back_s"], found["convicted_s"]) == (1.5, 8.0)


def test_crashes_beyond_the_spares_may_take_the_start_of_a_process() -> None:
    crash = replace(CRASH, start_s=10.0)

    ratios = [figures(crash, POISON, spares)["innocents_done_ratio"] for spares in (0, 2, 6, 9)]

    assert ratios == [0.163, 0.21, 0.5, 0.5]


def test_good_runs_have_no_faults() -> None:
    assert list(faults(CRASH, POISON, 0, targets=True)) == []


@pytest.mark.parametrize(
    ("crash", "poison", "says"),
    [
        (replace(CRASH, again=0), POISON, "no crash was seen"),
        (CRASH, replace(POISON, crashes=0), "the poison crashed nobody"),
        (CRASH, replace(POISON, again=0), "the poison crashed nobody"),
        (CRASH, replace(POISON, code="completed"), "the poison ended as completed"),
        (replace(CRASH, failed=1), POISON, "1 innocents failed beside the chance crash"),
        (CRASH, replace(POISON, failed=2), "2 innocents failed beside the poison"),
    ],
)
@pytest.mark.parametrize("targets", [True, False])
def test_a_check_without_findings_is_a_fault(
    crash: Crash, poison: Poison, says: str, targets: bool
) -> None:
    (fault,) = faults(crash, poison, 0, targets=targets)
    assert fault.startswith(says)


@pytest.mark.parametrize(
    ("crash", "poison"),
    [
        (replace(CRASH, back_s=3.1), POISON),
        (replace(CRASH, back_s=math.inf), POISON),
        (CRASH, replace(POISON, innocents_done_s=26.1)),
    ],
)
def test_missed_targets_are_faults_except_in_a_quick_run(crash: Crash, poison: Poison) -> None:
    assert len(list(faults(crash, poison, 0, targets=True))) == 1
    assert not list(faults(crash, poison, 0, targets=False))


def test_figures_are_medians_of_the_runs() -> None:
    assert median([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0}
