"""When a process of the pool is killed because it makes no progress."""

from __future__ import annotations

import pytest

from tests.support.fake_clock import FakeClock
from tests.support.pools import WARM, A, engine_info, make_handle, make_ready
from worker.engines import Memory
from worker.host.process_state import State
from worker.messages import Heartbeat, Ready


class TestHang:
    def test_no_progress_with_pending_work_is_a_hang(self, fake_clock: FakeClock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=2))
        for _ in range(61):
            assert handle.kill_reason == ""
            fake_clock.advance(1)
            handle.note_heartbeat(Heartbeat(progress=5, unfinished=2))

        assert handle.kill_reason == "no progress for 61 s while 2 requests wait"

    @pytest.mark.parametrize(
        "beats",
        [
            pytest.param([(1, step, 2) for step in range(100)], id="progress"),
            pytest.param([(1, 5, 0)] * 100, id="no work"),
            pytest.param([(0, 5, 0), (59, 5, 0), (59, 5, 1)], id="work after a long idle time"),
        ],
    )
    def test_a_process_with_these_heartbeats_does_not_hang(
        self, fake_clock: FakeClock, beats: list[tuple[int, int, int]]
    ) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        for waited_s, progress, unfinished in beats:
            fake_clock.advance(waited_s)
            handle.note_heartbeat(Heartbeat(progress=progress, unfinished=unfinished))

            assert handle.kill_reason == ""

    def test_each_engine_counts_from_its_own_start(self, fake_clock: FakeClock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=2))
        handle.warm(WARM)
        handle.load(A)
        handle.ready(Ready(engine_info(A), Memory(host=3000)))
        fake_clock.advance(59)
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=1))
        fake_clock.advance(59)

        assert handle.kill_reason == ""

    def test_a_process_without_a_sign_of_life_hangs(self, fake_clock: FakeClock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        fake_clock.advance(61)

        assert handle.kill_reason

    def test_a_draining_process_is_watched_too(self, fake_clock: FakeClock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        handle.drain()
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=1))
        fake_clock.advance(61)

        assert handle.kill_reason

    @pytest.mark.parametrize("state", [State.WARMING, State.LOADING, State.UNLOADING])
    def test_a_change_of_state_may_take_longer(self, fake_clock: FakeClock, state: State) -> None:
        handle = make_handle(start_timeout_s=600.0, hang_timeout_s=60.0)
        handle._enter(state)
        fake_clock.advance(599)
        assert handle.kill_reason == ""
        fake_clock.advance(2)
        assert handle.kill_reason == f"still {state.value} after 601 s"

    @pytest.mark.parametrize("state", [State.WARMING, State.LOADING, State.UNLOADING])
    def test_a_process_that_sends_signs_of_life_may_take_its_time(
        self, fake_clock: FakeClock, state: State
    ) -> None:
        """A download, or a compilation, of hours; but not for ever."""
        handle = make_handle(start_timeout_s=600.0, load_timeout_s=5990.0)
        handle._enter(state)
        for _ in range(10):
            fake_clock.advance(599)
            handle.note_heartbeat(Heartbeat(progress=0, unfinished=0))

        assert handle.kill_reason == ""
        fake_clock.advance(1)
        assert handle.kill_reason == f"still {state.value} after 5991 s (load_timeout_s)"

    @pytest.mark.parametrize(
        "state",
        [State.DOWN, State.WARM, State.DRAINED, State.ASLEEP, State.ATTACHED, State.STOPPED],
    )
    def test_processes_in_other_states_are_not_killed(
        self, fake_clock: FakeClock, state: State
    ) -> None:
        handle = make_handle()
        handle._enter(state)
        fake_clock.advance(10_000)

        assert handle.kill_reason == ""

    def test_time_without_a_listener_does_not_count(self, fake_clock: FakeClock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        fake_clock.advance(100)

        handle.excuse(50.0)

        assert handle.kill_reason == ""
        fake_clock.advance(11)
        assert handle.kill_reason
