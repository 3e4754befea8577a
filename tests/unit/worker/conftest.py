"""Pools with played processes, and a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import worker.host.process_handle
from tests.support.pools import Theatre, theatre


class Clock:
    """The time of a process handle."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000.0 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker.host.process_handle, "time", clock)
    return clock


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Theatre]:
    """One device with a spare."""
    with theatre(monkeypatch, spares=1, drain_timeout_s=60.0) as played:
        played.warm_up()
        yield played


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Theatre]:
    """Two devices."""
    with theatre(monkeypatch, slots=2) as played:
        played.warm_up()
        yield played
