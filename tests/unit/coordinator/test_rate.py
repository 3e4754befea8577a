"""How fast the yard serves."""

from __future__ import annotations

import pytest

from coordinator.dispatch.rate import LEAST_S, NEWEST, ServiceRate


@pytest.fixture
def rate() -> ServiceRate:
    started = ServiceRate()
    assert not started.measure(100.0), "there is nothing to measure from yet"
    return started


def test_the_first_measurement_counts_whole(rate: ServiceRate) -> None:
    rate.count(30)
    rate.count(10)
    rate.note(busy=True)

    assert rate.measure(102.0)
    assert rate.per_s == 20.0


def test_later_ones_move_it(rate: ServiceRate) -> None:
    rate.count(20)
    rate.measure(101.0)
    rate.count(40)

    assert rate.measure(102.0)
    assert rate.per_s == pytest.approx(NEWEST * 40 + (1 - NEWEST) * 20)


def test_while_nobody_waits_it_is_not_the_yards_speed(rate: ServiceRate) -> None:
    rate.count(5)
    rate.note(busy=False)
    rate.note(busy=True)

    assert not rate.measure(101.0)
    assert rate.per_s == 0.0
    # The next measurement begins anew.
    rate.count(7)
    assert rate.measure(102.0)
    assert rate.per_s == 7.0


def test_a_yard_that_stands_still_says_nothing(rate: ServiceRate) -> None:
    rate.note(busy=True)

    assert not rate.measure(101.0)


def test_what_is_too_short_goes_on(rate: ServiceRate) -> None:
    rate.count(5)
    assert not rate.measure(100.0 + LEAST_S / 2)
    rate.count(5)

    assert rate.measure(101.0)
    assert rate.per_s == 10.0
