"""The broker's time by our monotonic clock."""

from __future__ import annotations

import threading

import pytest

from tests.support.fake_clock import FakeClock, begin_test, faked
from tokenyard import clock
from tokenyard.clock import MEASURE_EVERY_S, BrokerTime

HOUR_S = 3600
BEGAN_S = 1_700_000_000


@pytest.fixture
def broker_time(fake_clock: FakeClock) -> BrokerTime:
    """Measured once, in a round trip of 0.2 s."""
    measured = BrokerTime()
    asked_at = fake_clock.now
    fake_clock.advance(0.2)
    measured.measured((BEGAN_S, 500_000), asked_at)
    return measured


def test_it_goes_on_from_the_answer(fake_clock: FakeClock, broker_time: BrokerTime) -> None:
    assert broker_time.now_ms == pytest.approx(1000 * BEGAN_S + 500)
    fake_clock.advance(1.0)
    assert broker_time.now_ms == pytest.approx(1000 * BEGAN_S + 1500)
    in_a_minute = broker_time.to_monotonic(broker_time.now_ms + 60_000)
    assert in_a_minute == pytest.approx(fake_clock.now + 60)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
def test_a_step_of_our_clock_does_not_move_it(
    fake_clock: FakeClock, broker_time: BrokerTime, step_s: float
) -> None:
    fake_clock.step(step_s)
    assert broker_time.now_ms == pytest.approx(1000 * BEGAN_S + 500)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
def test_a_step_of_the_brokers_clock_is_told_once(
    fake_clock: FakeClock, broker_time: BrokerTime, step_s: int
) -> None:
    assert broker_time.take_step()[0] == 0, "the first measurement is none"
    fake_clock.advance(1.0)
    broker_time.measured((BEGAN_S + 1 + step_s, 500_000), fake_clock.now)
    fake_clock.advance(2.0)
    assert broker_time.take_step() == pytest.approx((1000 * step_s, 2000))
    assert broker_time.take_step()[0] == 0
    assert broker_time.now_ms == pytest.approx(1000 * (BEGAN_S + step_s) + 3500)


def test_an_answer_that_took_long_is_no_step(
    fake_clock: FakeClock, broker_time: BrokerTime
) -> None:
    asked_at = fake_clock.now
    fake_clock.advance(60.0)  # the server had answered at once
    broker_time.measured((BEGAN_S, 500_000), asked_at)
    assert broker_time.take_step()[0] == 0
    assert broker_time.now_ms == pytest.approx(1000 * BEGAN_S + 60_500)


@pytest.mark.parametrize("took_ms", [(200, 20, 4), (4, 20, 200)])
def test_it_is_never_ahead_and_as_near_as_the_fastest_answer(
    fake_clock: FakeClock, took_ms: tuple[int, ...]
) -> None:
    began, measured = fake_clock.now, BrokerTime()
    for each in took_ms:
        asked_at = fake_clock.now
        fake_clock.advance(each / 2000)
        server_us = round((fake_clock.now - began) * 1e6)
        fake_clock.advance(each / 2000)
        measured.measured((BEGAN_S + server_us // 10**6, server_us % 10**6), asked_at)
    true_ms = 1000 * (BEGAN_S + fake_clock.now - began)
    assert true_ms - 2.1 < measured.now_ms <= true_ms


def test_it_is_measured_now_and_then_and_behind_an_outage(
    fake_clock: FakeClock, broker_time: BrokerTime
) -> None:
    assert BrokerTime().is_due
    assert not broker_time.is_due
    broker_time.expire()
    assert broker_time.is_due
    broker_time.measured((BEGAN_S, 0), fake_clock.now)
    fake_clock.advance(MEASURE_EVERY_S)
    assert broker_time.is_due


def test_a_thread_of_an_earlier_test_does_not_move_this_ones_time() -> None:
    go_on = threading.Event()
    times: list[float] = []

    def sleep() -> None:
        go_on.wait(60.0)
        times.append(clock.monotonic())
        clock.sleep(0.01)

    earlier = threading.Thread(target=sleep)
    real = clock.monotonic()
    earlier.start()
    begin_test()
    with faked() as fake:
        began = fake.now
        go_on.set()
        earlier.join(60.0)
        assert not earlier.is_alive()
        assert fake.now == began
        assert times[0] >= real
