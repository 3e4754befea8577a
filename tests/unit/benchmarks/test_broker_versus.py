"""How two checkouts are compared: by pairs of neighbouring bursts."""

from __future__ import annotations

import random

import pytest

from benchmarks.broker_versus import Burst, Pair, summary


def drifting(slower: float, pairs: int = 60) -> list[Pair]:
    """Bursts on a machine whose speed doubles and halves; this checkout takes so much longer."""
    draw = random.Random(7)

    def pair() -> Pair:
        speed = draw.uniform(0.5, 1.0)
        took = [draw.gauss(1.0, 0.02) / speed for _ in range(2)]
        cpu = [{"broker": 0.5 * one} for one in took]
        cpu[1]["broker"] *= slower
        return Burst(took[0], cpu[0]), Burst(took[1] * slower, cpu[1])

    return [pair() for _ in range(pairs)]


@pytest.mark.parametrize("slower", [0.92, 1.0, 1.08])
def test_a_drift_of_the_machine_does_not_hide_a_difference(slower: float) -> None:
    figures = summary(drifting(slower), requests=100)

    low, high = figures["requests_per_s_low"], figures["requests_per_s_high"]
    assert low < 1 / slower < high
    assert high - low < 0.04
    assert figures["cpu_us_broker_low"] < slower < figures["cpu_us_broker_high"]
    assert (low <= 1 <= high) is (slower == 1.0)


def test_rates_and_times_are_those_of_the_sides() -> None:
    one = (Burst(2.0, {"broker": 1.0}), Burst(1.0, {"broker": 0.5}))

    figures = summary([one, one], requests=100)

    assert (figures["other_requests_per_s"], figures["this_requests_per_s"]) == (50, 100)
    assert (figures["other_cpu_us_broker"], figures["this_cpu_us_broker"]) == (10_000, 5_000)
    assert (figures["requests_per_s_ratio"], figures["cpu_us_broker_ratio"]) == (2.0, 0.5)
