"""A clock for tests in place of the machine's (`tokenyard.clock`)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tokenyard import clock
from tokenyard.clock import Clock, SystemClock

#: How long a waiting thread looks away; no test depends on it.
_LOOK_S: Final = 0.001

#: Threads that earlier tests have left behind; they would otherwise move this test's time.
_of_earlier_tests: set[threading.Thread] = set()


def begin_test() -> None:
    """The threads that run by now, but for this one, are of earlier tests."""
    _of_earlier_tests.clear()
    _of_earlier_tests.update(threading.enumerate())
    _of_earlier_tests.discard(threading.current_thread())


class FakeClock:
    """Time passes when the test says so, and when somebody sleeps, who then need not wait.

    With ``is_held`` it passes only when the test says so: sleepers wait for that. The clock of the
    broker is the server's own; `BrokerTime` measures it by this one.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        self._moved = threading.Condition()
        self._now = 1000.0
        self._wall = 1_800_000_000.0 - self._now
        self._is_held = is_held
        #: How much passes whenever somebody asks for the time.
        self.ticks_s = 0.0

    @property
    def now(self) -> float:
        """`monotonic`, for the test."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._wall += seconds

    # What the product calls

    def monotonic(self) -> float:
        self._now += self.ticks_s
        return self._now

    def wall(self) -> float:
        return self._now + self._wall

    def sleep(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if not self._is_held and seconds is not None:
            if not event.is_set():
                self.advance(seconds)
            return event.is_set()
        until = None if seconds is None else self._now + seconds
        while not event.is_set() and (until is None or self._now < until):
            event.wait(_LOOK_S)
        return event.is_set()

    async def pause(self, seconds: float) -> None:
        until = self._now + seconds
        if not self._is_held:
            self.advance(seconds)
        await asyncio.sleep(0)
        while self._now < until:  # noqa: ASYNC110 - threads move it
            await asyncio.sleep(_LOOK_S)


class _Ours:
    """The fake clock for the threads of this test, the machine's for those of earlier tests."""

    def __init__(self, fake: FakeClock) -> None:
        self._fake = fake
        self._machine = SystemClock()

    @property
    def _clock(self) -> Clock:
        is_earlier = threading.current_thread() in _of_earlier_tests
        return self._machine if is_earlier else self._fake

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall(self) -> float:
        return self._clock.wall()

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        return self._clock.wait(event, seconds)

    async def pause(self, seconds: float) -> None:
        await self._clock.pause(seconds)


@contextmanager
def faked(*, is_held: bool = False) -> Iterator[FakeClock]:
    """The time of this test's threads is this clock's in the block."""
    fake = FakeClock(is_held=is_held)
    before = clock.use(_Ours(fake))
    try:
        yield fake
    finally:
        clock.use(before)
