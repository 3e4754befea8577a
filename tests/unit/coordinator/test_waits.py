"""What a request waited for most of the time, and how fast the yard serves."""

from __future__ import annotations

import pytest

from coordinator.dispatch.waits import LEAST_S, NEWEST, ServiceRate, WaitReasons
from coordinator.routing.queued_request import QueuedRequest


def queued(since_ms: float) -> QueuedRequest:
    return QueuedRequest(intake="normal", entry="1-0", id="q", model="m", since_ms=since_ms)


@pytest.fixture
def reasons() -> WaitReasons:
    """A term that began at 10 s, without a worker until 40 s; then all places were taken."""
    reasons = WaitReasons()
    reasons.begin(10_000)
    for second in range(10, 41):
        reasons.note({"m": "no worker was ready", "other": "it was paused"}, second * 1000)
    for second in range(41, 61):
        reasons.note({"m": "all places were taken"}, second * 1000)
    return reasons


@pytest.mark.parametrize(
    ("since_s", "told"),
    [
        (9, "lane; for 31.0 s no worker was ready"),
        (30, "lane; for 19.0 s all places were taken"),
        (-60, "lane; for 70.0 s another coordinator led, or none"),
        (59.5, "lane"),
        (70, "lane"),
    ],
)
def test_the_longest_reason_is_told(reasons: WaitReasons, since_s: float, told: str) -> None:
    assert reasons.tell(queued(since_s * 1000), 60_000, "lane") == told


def test_nothing_is_told_of_what_was_not_seen() -> None:
    assert WaitReasons().tell(queued(0), 5_000, "lane") == "lane"


def test_names_that_clients_invent_are_forgotten(reasons: WaitReasons) -> None:
    for number in range(3000):
        names = ("m", f"invented-{number}")
        reasons.note(dict.fromkeys(names, "all places were taken"), 60_000)

    assert len(reasons._spells) <= 1000
    assert reasons.tell(queued(30_000), 60_000, "lane") == "lane; for 19.0 s all places were taken"


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
