"""The controller's waits: a process that is due is started at once, not at the next tick."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tokenyard.settings import WorkerSettings
from worker.controller import TICK_S, Controller
from worker.slot import Slot, State


@pytest.fixture
def controller() -> Iterator[Controller]:
    settings = WorkerSettings(redis_url="redis://127.0.0.1:1", engine="simulated", slots=2)
    built = Controller(settings)
    yield built
    built._bell.close()


def slots(controller: Controller) -> tuple[Slot, Slot]:
    one, other = controller._slots
    return one, other


def test_nothing_is_due_while_all_run(controller: Controller) -> None:
    for slot in slots(controller):
        slot.state = State.READY

    assert controller._until_due() == TICK_S


def test_the_next_start_ends_the_wait(controller: Controller) -> None:
    one, other = slots(controller)
    one.state = State.READY
    other.start_at = time.monotonic() + TICK_S / 2

    assert 0 < controller._until_due() <= TICK_S / 2
    # One that is far away does not make the tick longer, one that is past not negative.
    other.start_at = time.monotonic() + 60
    assert controller._until_due() == TICK_S
    other.start_at = 0.0
    assert controller._until_due() == 0.0
