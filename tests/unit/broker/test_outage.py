"""What a log says while a broker cannot be used."""

from __future__ import annotations

import logging

import pytest
from redis import exceptions

from tests.support.fake_clock import FakeClock
from tokenyard.broker.outage import EVERY_S, Outage

DISK = exceptions.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")
AWAY = exceptions.ConnectionError("Error 111 connecting to 127.0.0.1:1. Connection refused.")


class Logged:
    """An outage, and what its log says."""

    def __init__(self, caplog: pytest.LogCaptureFixture, fake_clock: FakeClock) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.clock = fake_clock
        self.outage = Outage(logging.getLogger("test"), "leading")

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, fake_clock: FakeClock) -> Logged:
    return Logged(caplog, fake_clock)


def test_an_error_is_logged_once_and_again_after_a_while(logged: Logged) -> None:
    for _ in range(100):
        logged.outage.note(DISK)
    logged.clock.advance(EVERY_S)
    logged.outage.note(DISK)

    first, second = logged.lines
    assert first == (
        "leading: the broker cannot write to its disk and refuses all writes. Make room on its"
        " disk, and check the server's log (MISCONF); trying again"
    )
    assert second == f"{first}, for 30 s now"


def test_a_different_error_is_logged_immediately(logged: Logged) -> None:
    for error in (DISK, AWAY, AWAY, DISK):
        logged.outage.note(error)

    assert len(logged.lines) == 3
    assert "Connection refused" in logged.lines[1]


def test_pauses_grow_to_the_longest_however_long_the_outage_is(logged: Logged) -> None:
    first = logged.outage.note(AWAY)
    later = [logged.outage.note(AWAY) for _ in range(2_000)]
    logged.outage.over()

    assert first <= 0.1
    assert later[-1] == 2.0
    assert logged.outage.note(AWAY) <= 0.1


def test_the_end_of_an_outage_is_logged(logged: Logged) -> None:
    logged.outage.over()
    logged.outage.note(AWAY)
    logged.clock.advance(7)
    logged.outage.over()
    logged.outage.over()

    assert logged.lines[1:] == ["leading: works again after 7 s"]
