"""The bell: what a signal handler and other threads may ring."""

from __future__ import annotations

import os
import select
import threading

import pytest

from tokenyard.process.wake_pipe import WakeupPipe


@pytest.fixture
def wakeup() -> WakeupPipe:
    return WakeupPipe()


def _ends(wakeup: WakeupPipe, timeout_s: float = 3600.0) -> bool:
    """Whether a wait returns though its time is not over."""
    waiter = threading.Thread(target=wakeup.wait, args=(timeout_s,), daemon=True)
    waiter.start()
    waiter.join(60.0)
    return not waiter.is_alive()


def test_many_wakeups_end_one_wait(wakeup: WakeupPipe) -> None:
    for _ in range(100_000):
        wakeup.set()

    assert _ends(wakeup)


def test_a_wakeup_from_another_thread_ends_the_wait(wakeup: WakeupPipe) -> None:
    ringer = threading.Timer(0.05, wakeup.set)
    ringer.start()

    assert _ends(wakeup)
    ringer.join()


def test_a_cleared_wakeup_does_not_end_the_next_wait(wakeup: WakeupPipe) -> None:
    wakeup.set()
    wakeup.clear()
    wakeup.clear()
    assert select.select([wakeup], [], [], 0) == ([], [], [])
    rung = threading.Event()

    def ring() -> None:
        rung.set()
        wakeup.set()

    ringer = threading.Timer(0.05, ring)
    ringer.start()
    wakeup.wait(60.0)

    assert rung.is_set()
    ringer.join()


def test_a_time_that_has_passed_is_not_waited_for(wakeup: WakeupPipe) -> None:
    assert _ends(wakeup, -1.0)


def test_a_held_pipe_may_be_set_and_then_its_descriptors_are_free() -> None:
    wakeup = WakeupPipe()
    ears = wakeup.fileno()
    ring = wakeup.set
    del wakeup

    ring()
    os.fstat(ears)

    del ring
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ears)
