"""How fast the yard serves."""

from __future__ import annotations

import pytest

from coordinator.dispatch.waits import LEAST_S, NEWEST, ServiceRate


@pytest.fixture
def rate() -> ServiceRate:
    started = ServiceRate()
    assert not started.measure(100.0), "there is nothing to measure from yet"
    return started


def test_the_first_measurement_is_the_rate(rate: ServiceRate) -> None:
    rate.count(30)
    rate.count(10)
    rate.note(busy=True)

    assert rate.measure(102.0)
    assert rate.per_s == 20.0


def test_later_measurements_move_the_rate(rate: ServiceRate) -> None:
    rate.count(20)
    rate.measure(101.0)
    rate.count(40)

    assert rate.measure(102.0)
    assert rate.per_s == pytest.approx(NEWEST * 40 + (1 - NEWEST) * 20)


def test_the_rate_is_not_measured_while_no_request_waits(rate: ServiceRate) -> None:
    rate.count(5)
    rate.note(busy=False)
    rate.note(busy=True)

    assert not rate.measure(101.0)
    assert rate.per_s == 0.0
    # The next measurement begins again.
    rate.count(7)
    assert rate.measure(102.0)
    assert rate.per_s == 7.0


def test_an_idle_yard_has_no_rate(rate: ServiceRate) -> None:
    rate.note(busy=True)

    assert not rate.measure(101.0)


def test_a_short_measurement_continues(rate: ServiceRate) -> None:
    rate.count(5)
    assert not rate.measure(100.0 + LEAST_S / 2)
    rate.count(5)

    assert rate.measure(101.0)
    assert rate.per_s == 10.0
