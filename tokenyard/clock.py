"""The time, and waiting for it: the only module that asks the machine for either.

Durations, deadlines and leases count by `monotonic`, which no step of a clock moves. What the
broker and we both speak of, such as a deadline on the wire, is `BrokerTime`. `wall` is for what
people and files read. Tests put a clock of their own in its place (`tests/support/fake_clock.py`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

#: How old a measurement of the broker's clock may become.
MEASURE_EVERY_S: Final = 3.0
#: A smaller difference between two measurements is no step: clocks drift.
STEP_MS: Final = 2000.0


class Clock(Protocol):
    """Where the functions of this module get the time."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""

    def wall(self) -> float:
        """Seconds since 1970."""

    def sleep(self, seconds: float) -> None:
        """Wait so long."""

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait for an event, at most so long; whether it is set."""

    async def pause(self, seconds: float) -> None:
        """Wait so long, in a coroutine."""


class SystemClock:
    """The machine's."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)
    pause = staticmethod(asyncio.sleep)

    @staticmethod
    def wait(event: threading.Event, seconds: float | None) -> bool:
        """See `Clock`."""
        return event.wait(seconds)


_clock: Clock = SystemClock()


def use(clock: Clock) -> Clock:
    """Take the time from this clock; returns the one before."""
    global _clock
    before, _clock = _clock, clock
    return before


def monotonic() -> float:
    """Seconds since some moment, to measure durations; never goes back."""
    return _clock.monotonic()


def wall() -> float:
    """Seconds since 1970 by this machine, which may be wrong or set again at any time."""
    return _clock.wall()


def wall_ms() -> int:
    """`wall` in whole milliseconds."""
    return int(_clock.wall() * 1000)


def sleep(seconds: float) -> None:
    """Wait so long."""
    _clock.sleep(seconds)


def wait(event: threading.Event, seconds: float | None) -> bool:
    """Wait for an event, at most so long; whether it is set."""
    return _clock.wait(event, seconds)


async def pause(seconds: float) -> None:
    """Wait so long, in a coroutine."""
    await _clock.pause(seconds)


class BrokerTime:
    """The broker's clock, told by ours since it was last asked.

    A step of this machine's clock does not move it, and one of the broker's only until the next
    measurement: ask the broker again on each new connection, and when `is_due`. Until it has been
    measured it is this machine's.
    """

    def __init__(self) -> None:
        self._ahead_ms = wall() * 1000 - monotonic() * 1000
        self._measured_at = float("-inf")
        self._is_known = False
        self._step_ms, self._stepped_at = 0.0, 0.0

    @property
    def is_due(self) -> bool:
        """Whether it was never measured, or long ago."""
        return monotonic() - self._measured_at >= MEASURE_EVERY_S

    def measured(self, answer: Sequence[int], asked_at: float) -> None:
        """Take the answer to TIME, which was sent at that `monotonic`: seconds, microseconds.

        The server read its clock at some moment since. What was known stays if that agrees;
        otherwise `now_ms` is behind rather than ahead, so that nothing ends before its time.
        """
        now = monotonic()
        seconds, micros = answer
        server_ms = int(seconds) * 1000 + int(micros) / 1000
        least_ms, most_ms = server_ms - now * 1000, server_ms - asked_at * 1000
        ahead_ms = min(max(self._ahead_ms, least_ms), most_ms) if self._is_known else least_ms
        by_ms = ahead_ms - self._ahead_ms
        if self._is_known and abs(by_ms) > STEP_MS:
            self._step_ms, self._stepped_at = self._step_ms + by_ms, now
        self._ahead_ms, self._measured_at, self._is_known = ahead_ms, now, True

    def take_step(self) -> tuple[float, float]:
        """By how many ms the broker's clock was set since the last call, and how many ms ago.

        A negative step went back; 0 is none.
        """
        step_ms, self._step_ms = self._step_ms, 0.0
        return step_ms, (monotonic() - self._stepped_at) * 1000

    def expire(self) -> None:
        """Measure again soon: the broker may be another one, or have been restarted."""
        self._measured_at = float("-inf")

    @property
    def now_ms(self) -> float:
        """Milliseconds since 1970 by the broker."""
        return monotonic() * 1000 + self._ahead_ms

    def to_monotonic(self, unix_ms: float) -> float:
        """When that time of the broker will be, by `monotonic`."""
        return (unix_ms - self._ahead_ms) / 1000
