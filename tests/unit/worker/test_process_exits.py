"""Why a process of the pool has ended, and how long its successor waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from tests.support.fake_clock import FakeClock
from tests.support.pools import WARM, make_handle, make_ready
from worker.host.process_handle import CRASH_LOOP, HEALTHY_S, MOST_IN_SERVICE, WorkerProcessHandle
from worker.host.process_state import State

NOBODY = 2**31 - 1  # no process has this id


class TestBackoff:
    @pytest.fixture(autouse=True)
    def _no_jitter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("random.random", lambda: 1.0)

    def _die(
        self, handle: WorkerProcessHandle, fake_clock: FakeClock, lived_s: float = 1.0
    ) -> float:
        handle._started = fake_clock.now
        fake_clock.advance(lived_s)
        handle.reap()
        assert handle.state is State.DOWN
        return handle.start_at - fake_clock.now

    def test_pauses_grow_up_to_a_bound(self, fake_clock: FakeClock) -> None:
        handle = make_handle()
        pauses = [self._die(handle, fake_clock) for _ in range(6)]

        assert pauses == sorted(pauses)
        assert pauses[0] < pauses[1] < pauses[2]
        assert pauses[-1] == 8.0

    def test_a_process_that_has_served_starts_with_the_shortest_pause(
        self, fake_clock: FakeClock
    ) -> None:
        handle = make_handle()
        first = self._die(handle, fake_clock)
        for _ in range(5):
            self._die(handle, fake_clock)

        longer = self._die(handle, fake_clock, HEALTHY_S + 1)
        assert longer > first, "a warm-up that takes long and fails is no service"
        handle.warm(WARM)
        assert self._die(handle, fake_clock, HEALTHY_S + 1) == first

    def test_deaths_in_a_row_are_a_crash_loop(self, fake_clock: FakeClock) -> None:
        handle = make_handle()
        for _ in range(CRASH_LOOP):
            assert not handle.is_in_crash_loop
            self._die(handle, fake_clock)
        assert handle.is_in_crash_loop

        handle._enter(State.WARMING)
        assert not handle.is_in_crash_loop, "it gets another chance"

    def test_deaths_in_service_cost_the_shortest_pause_for_a_while(
        self, fake_clock: FakeClock
    ) -> None:
        handle = make_ready()
        pauses = []
        for _ in range(MOST_IN_SERVICE + 3):
            handle._enter(State.READY)
            pauses.append(self._die(handle, fake_clock))
            assert not handle.is_in_crash_loop

        assert len(set(pauses[:MOST_IN_SERVICE])) == 1
        assert pauses[0] < pauses[-3] < pauses[-2]

    def test_a_replacement_is_no_failure(self, fake_clock: FakeClock) -> None:
        handle = make_handle()
        for _ in range(CRASH_LOOP):
            self._die(handle, fake_clock)

        handle.replace()

        assert self._die(handle, fake_clock) == 0, "no pause"
        assert not handle.is_in_crash_loop


def dead(exitcode: int, pid: int = NOBODY) -> Mock:
    """A process that has ended."""
    return Mock(exitcode=exitcode, pid=pid)


class TestDeparture:
    @pytest.mark.parametrize(
        ("status", "last_words", "cause", "why", "reason"),
        [
            (-signal.SIGKILL, "", None, "lost", "ended by SIGKILL"),
            (-signal.SIGTERM, "", None, "lost", "ended by SIGTERM"),
            (-signal.SIGSEGV, "", None, "crashed", "ended by SIGSEGV"),
            (-signal.SIGABRT, "", None, "crashed", "ended by SIGABRT"),
            (-signal.SIGKILL, "no progress", None, "crashed", "ended by SIGKILL: no progress"),
            (1, "RuntimeError: CUDA", None, "crashed", "exit status 1: RuntimeError: CUDA"),
            (0, "", None, "crashed", "exit status 0"),
            (255, "", None, "crashed", "exit status 255"),
            # All ranks of a group end like the one that died.
            (-signal.SIGKILL, "rank 1 died", "lost", "lost", "ended by SIGKILL: rank 1 died"),
        ],
    )
    def test_an_own_exit_and_a_kill_from_outside_are_told_apart(
        self, status: int, last_words: str, cause: str | None, why: str, reason: str
    ) -> None:
        handle = make_handle()
        handle.process = dead(status)
        handle.last_words, handle.exit_cause = last_words, cause

        assert handle.why_exited() == (why, reason)

    def test_a_replaced_process_has_left(self) -> None:
        handle = make_handle()
        handle.process = dead(-signal.SIGKILL)

        handle.replace()

        assert handle.why_exited() == ("left", "ended by SIGKILL: replaced")

    def test_a_known_departure_is_of_one_process(self) -> None:
        handle = make_ready()
        handle.last_words, handle.exit_cause, handle.is_retiring = "no progress", "lost", True
        handle.worker, handle.sleep_level = "w.1", 2

        handle.reap()

        assert (handle.last_words, handle.exit_cause, handle.is_retiring) == ("", None, False)
        assert (handle.worker, handle.sleep_level) == ("", 0)
        assert (handle.spec, handle.engine, handle.memory.now) == (None, None, None)

    def test_a_process_that_only_looks_dead_is_killed(self) -> None:
        # Given a process whose fork-server was killed, so that its exit status is unknown
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
            handle = make_handle()
            handle.process = dead(255, living.pid)

            # I expect it to count as lost, now and later.
            assert handle.why_exited() == ("lost", "its fork-server is gone")
            handle.reap()

            assert living.wait(60.0) == -signal.SIGKILL

    def test_reaping_an_exited_process_kills_nothing(self) -> None:
        handle = make_handle()
        handle.process = dead(1, os.getpid())

        handle.reap()
