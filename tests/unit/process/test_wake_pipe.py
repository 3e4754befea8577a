"""The bell: what a signal handler and other threads may ring."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tokenyard.process.wake_pipe import Bell


@pytest.fixture
def bell() -> Bell:
    return Bell()


def _waited_s(bell: Bell, timeout_s: float) -> float:
    began = time.monotonic()
    bell.wait(timeout_s)
    return time.monotonic() - began


def test_ringing_ends_the_wait_however_often(bell: Bell) -> None:
    for _ in range(100_000):
        bell.ring()

    assert _waited_s(bell, 10.0) < 5.0


def test_it_is_heard_from_another_thread(bell: Bell) -> None:
    ringer = threading.Timer(0.05, bell.ring)
    ringer.start()

    assert _waited_s(bell, 10.0) < 5.0
    ringer.join()


def test_what_was_heard_does_not_ring_again(bell: Bell) -> None:
    bell.ring()
    bell.hear()
    bell.hear()

    assert _waited_s(bell, 0.05) >= 0.04


def test_a_time_that_has_passed_is_not_waited_for(bell: Bell) -> None:
    assert _waited_s(bell, -1.0) < 5.0


def test_who_holds_it_may_ring_and_then_its_descriptors_are_free() -> None:
    bell = Bell()
    ears = bell.fileno()
    ring = bell.ring
    del bell

    ring()
    os.fstat(ears)

    del ring
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ears)
