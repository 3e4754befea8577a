"""One process of the pool: its state, and when it should be killed or replaced."""

from __future__ import annotations

import pytest

import worker.host.process_handle
from tests.support.fake_clock import FakeClock
from tests.support.pools import A, engine_info, make_handle, make_ready, make_warm
from worker.engines import Memory, RankGroup
from worker.host.leak import Verdict
from worker.host.process_state import State
from worker.messages import Asleep, Ready, Stop, Warm

INFO = engine_info(A)


class TestLife:
    def test_a_process_goes_from_warm_to_ready_and_back(self) -> None:
        handle = make_warm()
        assert (handle.state, handle.spec, handle.phases_s) == (State.WARM, None, {"import": 2.0})

        handle.load(A)
        assert (handle.state, handle.spec, handle.engine) == (State.LOADING, A, None)

        handle.ready(Ready(INFO, Memory(host=3000)))
        assert (handle.state, handle.engine, handle.phases_s) == (
            State.READY,
            INFO,
            {"weights": 1.0},
        )

        handle.drain()
        handle.drained()
        handle.unload()
        assert (handle.state, handle.spec) == (State.UNLOADING, A)

        handle.warm(Warm(Memory(host=1001), {"unload": 0.5}))
        assert (handle.state, handle.spec, handle.engine) == (State.WARM, None, None)
        assert handle.phases_s == {"unload": 0.5}

    def test_sleep_and_wake_keep_the_model(self) -> None:
        handle = make_ready()
        handle.sleep_level = 2
        handle.fall_asleep(2)
        assert (handle.state, handle.is_awake) == (State.UNLOADING, True)

        handle.asleep(Asleep(0.25, Memory(host=1500)))
        assert (handle.state, handle.is_awake, handle.spec) == (State.ASLEEP, False, A)
        assert (handle.phases_s, handle.memory.now) == ({"sleep": 0.25}, Memory(host=1500))

        handle.wake()
        assert handle.state is State.LOADING
        handle.ready(Ready(INFO, Memory(host=3000)))
        assert (handle.state, handle.spec, handle.sleep_level) == (State.READY, A, 0)

    def test_a_refused_load_leaves_the_process_warm(self) -> None:
        handle = make_warm()
        handle.load(A, RankGroup("a", 0, (0, 1)))

        handle.refused()

        assert (handle.state, handle.spec, handle.group) == (State.WARM, None, None)

    def test_a_refused_sleep_leaves_the_model_loaded(self) -> None:
        handle = make_ready()
        handle.fall_asleep(1)

        handle.refused()

        assert (handle.state, handle.spec) == (State.DRAINED, A)

    def test_a_late_report_of_a_drain_is_ignored(self) -> None:
        handle = make_ready()
        handle.drain()
        handle.unload()

        handle.drained()

        assert handle.state is State.UNLOADING

    def test_since_is_the_time_of_the_last_change_of_state(self, fake_clock: FakeClock) -> None:
        handle = make_ready()
        handle.drain()
        since = handle.since
        fake_clock.advance(5)

        handle.drain()
        assert handle.since == since
        handle.unload()
        assert handle.since == since + 5

    def test_an_attached_process_belongs_to_its_group(self) -> None:
        handle = make_warm()
        group = RankGroup("a", 1, (0, 1))

        handle.load(A, group)

        assert (handle.state, handle.spec, handle.group) == (State.ATTACHED, A, group)
        handle.warm(Warm(Memory(host=1000), {"attached": 9.0}))
        assert (handle.state, handle.spec, handle.group) == (State.WARM, None, None)


class TestMemory:
    def test_the_baseline_is_the_memory_of_the_first_warm_state(self) -> None:
        handle = make_warm()
        handle.warm(Warm(Memory(host=1100), {}))

        assert handle.memory.baseline == Memory(host=1000)
        assert handle.memory.kept == 100

    @pytest.mark.parametrize("reserved", [400, 0])
    def test_on_a_gpu_its_memory_counts(self, reserved: int) -> None:
        handle = make_handle()
        handle.warm(Warm(Memory(host=1000, device=reserved), {}))
        handle.warm(Warm(Memory(host=9000, device=reserved + 4), {}))

        assert handle.memory.kept == 4

    def test_a_loaded_model_is_no_leak(self) -> None:
        assert make_ready().leak is Verdict.SOUND

    def test_the_remainder_is_compared_with_the_memory_of_the_model(self) -> None:
        # Given a model of 2 GiB, of which half a GiB stays, and then a GiB more
        gib = 1024**3
        handle = make_warm()
        verdicts = []
        for after in (gib // 2, 3 * gib // 2):
            handle.load(A)
            handle.ready(Ready(INFO, Memory(host=after + gib)))
            handle.warm(Warm(Memory(host=after), {"unload": 0.1}))
            verdicts.append(handle.leak)

        # I expect the second remainder to count as a model that stays.
        assert verdicts == [Verdict.SOUND, Verdict.GROSS]

    def test_a_new_process_has_its_own_baseline(self) -> None:
        handle = make_warm()
        handle.reap()
        assert handle.leak is Verdict.SOUND

        handle.warm(Warm(Memory(host=5000), {}))

        assert (handle.memory.baseline, handle.leak) == (Memory(host=5000), Verdict.SOUND)


class TestDraining:
    def test_a_drain_may_take_its_grace(self, fake_clock: FakeClock) -> None:
        handle = make_ready(drain_timeout_s=30.0)
        handle.drain()
        fake_clock.advance(30)
        assert not handle.is_overdue
        fake_clock.advance(1)
        assert handle.is_overdue

    def test_the_next_drain_has_its_own_time(self, fake_clock: FakeClock) -> None:
        handle = make_ready(drain_timeout_s=30.0)
        handle.drain()
        fake_clock.advance(31)
        handle.unload()
        assert not handle.is_overdue, "it drains no more"

        handle.drain()

        assert not handle.is_overdue


class TestStart:
    @pytest.mark.parametrize("fault", [EOFError("unexpected EOF"), ConnectionRefusedError()])
    def test_a_fork_server_killed_during_a_start_counts_as_a_death(
        self, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch, fault: Exception
    ) -> None:
        # Given a fork-server that dies before it reports the process that it has started
        handle = make_handle()
        starting = [fault, None]

        def start(process: object) -> None:
            if now := starting.pop(0):
                raise now

        monkeypatch.setattr(worker.host.process_handle.fork_server.ForkedProcess, "start", start)

        hindrance = handle.start()

        # I expect the process to count as dead.
        assert hindrance.said.startswith(type(fault).__name__)
        assert (handle.state, handle.process, handle.pipe) == (State.DOWN, None, None)
        assert handle.start_at > fake_clock.now

        assert handle.start() is None

        assert handle.state is State.WARMING
        handle.pipe.close()


def test_a_handle_without_a_process_does_nothing() -> None:
    handle = make_handle()

    handle.send(Stop())
    handle.kill()

    assert handle.receive() == []
    handle.reap()
    assert handle.pid == 0
