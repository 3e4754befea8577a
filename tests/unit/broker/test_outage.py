"""What a log says while a broker cannot be used."""

from __future__ import annotations

import logging

import pytest
from redis import exceptions

from tokenyard.broker.outage import EVERY_S, Outage

DISK = exceptions.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")
AWAY = exceptions.ConnectionError("Error 111 connecting to 127.0.0.1:1. Connection refused.")


class Told:
    """An outage with a clock of its own, and what its log says."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.now = 100.0
        self.outage = Outage(logging.getLogger("test"), "leading", lambda: self.now)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    return Told(caplog)


def test_a_fault_is_told_once_and_again_after_a_while(told: Told) -> None:
    for _ in range(100):
        told.outage.note(DISK)
    told.now += EVERY_S
    told.outage.note(DISK)

    first, second = told.lines
    assert first == (
        "leading: the broker cannot write to its disk and refuses all writes. Make room on its"
        " disk, and look into the server's log (MISCONF); trying again"
    )
    assert second == f"{first}, for 30 s now"


def test_another_fault_is_told_at_once(told: Told) -> None:
    for fault in (DISK, AWAY, AWAY, DISK):
        told.outage.note(fault)

    assert len(told.lines) == 3
    assert "Connection refused" in told.lines[1]


def test_the_end_is_told(told: Told) -> None:
    told.outage.over()
    told.outage.note(AWAY)
    told.now += 7
    told.outage.over()
    told.outage.over()

    assert told.lines[1:] == ["leading: works again after 7 s"]
