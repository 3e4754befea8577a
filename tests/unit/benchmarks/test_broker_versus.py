"""How two checkouts are compared: by pairs of neighbouring bursts, in rounds with new yards."""

from __future__ import annotations

import random

import pytest

from benchmarks.broker_versus import Burst, Round, summary


def drifting(slower: float, *, luck: float = 0.0, rounds: int = 20) -> list[Round]:
    """Bursts on a machine whose speed doubles and halves; this checkout takes so much longer.

    ``luck`` is by how much yards of the same code differ.
    """
    draw = random.Random(7)

    def one_round() -> Round:
        yards = [draw.gauss(1.0, luck), slower * draw.gauss(1.0, luck)]
        bursts = []
        for _ in range(6):
            speed = draw.uniform(0.5, 1.0)
            took = [draw.gauss(yard, 0.02) / speed for yard in yards]
            bursts.append([Burst(one, {"broker": 0.5 * one}) for one in took])
        return [(other, this) for other, this in bursts]

    return [one_round() for _ in range(rounds)]


@pytest.mark.parametrize("slower", [0.92, 1.0, 1.08])
def test_a_drift_of_the_machine_does_not_hide_a_difference(slower: float) -> None:
    figures = summary(drifting(slower), requests=100)

    low, high = figures["requests_per_s_low"], figures["requests_per_s_high"]
    assert low < 1 / slower < high
    assert high - low < 0.04
    assert figures["cpu_us_broker_low"] < slower < figures["cpu_us_broker_high"]
    assert (low <= 1 <= high) is (slower == 1.0)


def test_the_luck_of_a_yard_is_no_difference_of_the_code() -> None:
    figures = summary(drifting(1.0, luck=0.05), requests=100)

    low, high = figures["requests_per_s_low"], figures["requests_per_s_high"]
    assert low < 1 < high
    assert high - low > 0.03, "as if each pair told something new of the code"


def test_rates_and_times_are_those_of_the_sides() -> None:
    one = (Burst(2.0, {"broker": 1.0}), Burst(1.0, {"broker": 0.5}))

    figures = summary([[one], [one]], requests=100)

    assert (figures["other_requests_per_s"], figures["this_requests_per_s"]) == (50, 100)
    assert (figures["other_cpu_us_broker"], figures["this_cpu_us_broker"]) == (10_000, 5_000)
    assert (figures["requests_per_s_ratio"], figures["cpu_us_broker_ratio"]) == (2.0, 0.5)
