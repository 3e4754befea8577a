"""One process of the pool: its state, and when it should be killed or replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import worker.host.process_handle
from tokenyard.protocol.settings import WorkerSettings
from worker.engines import EngineInfo, Memory, RankGroup
from worker.host.leak import Verdict
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import AWAKE, State
from worker.host.restart_backoff import CRASH_LOOP, HEALTHY_S, MOST_IN_SERVICE
from worker.messages import Asleep, Heartbeat, Ready, Stop, Warm
from worker.models import ModelSpec

ADDER = ModelSpec(name="adder", path="models/adder")
INFO = EngineInfo(
    "simulated", "7", "adder", "", 100, vocab_size=50, slots=4, phases_s={"weights": 1.5}
)
WARM = Warm(Memory(host=1000), {"import": 2.0})


class Clock:
    """A clock that the test sets."""

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


def make_handle(device: int = 0, **values) -> WorkerProcessHandle:
    settings = {"name": "w", "engine": "simulated", "backoff_s": 1.0, "max_backoff_s": 8.0}
    return WorkerProcessHandle(
        WorkerSettings(redis_url="redis://x", **(settings | values)), "w", device
    )


def make_warm(**values) -> WorkerProcessHandle:
    handle = make_handle(**values)
    handle.warm(WARM)
    return handle


def make_ready(**values) -> WorkerProcessHandle:
    handle = make_warm(**values)
    handle.load(ADDER)
    handle.ready(Ready(INFO, Memory(host=3000)))
    return handle


class TestLife:
    def test_a_process_goes_from_warm_to_ready_and_back(self) -> None:
        handle = make_warm()
        assert (handle.state, handle.spec, handle.phases_s) == (State.WARM, None, {"import": 2.0})

        handle.load(ADDER)
        assert (handle.state, handle.spec, handle.engine) == (State.LOADING, ADDER, None)

        handle.ready(Ready(INFO, Memory(host=3000)))
        assert (handle.state, handle.engine, handle.phases_s) == (
            State.READY,
            INFO,
            {"weights": 1.5},
        )

        handle.drain()
        handle.drained()
        handle.unload()
        assert (handle.state, handle.spec) == (State.UNLOADING, ADDER)

        handle.warm(Warm(Memory(host=1001), {"unload": 0.5}))
        assert (handle.state, handle.spec, handle.engine) == (State.WARM, None, None)
        assert handle.phases_s == {"unload": 0.5}

    def test_sleep_and_wake_keep_the_model(self) -> None:
        handle = make_ready()
        handle.sleep_level = 2
        handle.fall_asleep(2)
        assert (handle.state, handle.is_awake) == (State.UNLOADING, True)

        handle.asleep(Asleep(0.25, Memory(host=1500)))
        assert (handle.state, handle.is_awake, handle.spec) == (State.ASLEEP, False, ADDER)
        assert (handle.phases_s, handle.memory.now) == ({"sleep": 0.25}, Memory(host=1500))

        handle.wake()
        assert handle.state is State.LOADING
        handle.ready(Ready(INFO, Memory(host=3000)))
        assert (handle.state, handle.spec, handle.sleep_level) == (State.READY, ADDER, 0)

    def test_a_refused_load_leaves_the_process_warm(self) -> None:
        handle = make_warm()
        handle.load(ADDER, RankGroup("a", 0, (0, 1)))

        handle.refused()

        assert (handle.state, handle.spec, handle.group) == (State.WARM, None, None)

    def test_a_refused_sleep_leaves_the_model_loaded(self) -> None:
        handle = make_ready()
        handle.fall_asleep(1)

        handle.refused()

        assert (handle.state, handle.spec) == (State.DRAINED, ADDER)

    def test_a_late_report_of_a_drain_is_ignored(self) -> None:
        handle = make_ready()
        handle.drain()
        handle.unload()

        handle.drained()

        assert handle.state is State.UNLOADING

    def test_since_is_the_time_of_the_last_change_of_state(self, clock: Clock) -> None:
        handle = make_ready()
        handle.drain()
        since = handle.since
        clock.now += 5

        handle.drain()
        assert handle.since == since
        handle.unload()
        assert handle.since == since + 5

    @pytest.mark.parametrize("state", State)
    def test_only_a_process_that_holds_the_device_is_awake(self, state: State) -> None:
        handle = make_handle()
        handle.state = state

        others = {State.DOWN, State.WARMING, State.WARM, State.ASLEEP, State.STOPPED}
        assert handle.is_awake == (state not in others)
        assert others.isdisjoint(AWAKE)

    def test_an_attached_process_belongs_to_its_group(self) -> None:
        handle = make_warm()
        group = RankGroup("a", 1, (0, 1))

        handle.attach(ADDER, group)

        assert (handle.state, handle.spec, handle.group) == (State.ATTACHED, ADDER, group)
        handle.warm(Warm(Memory(host=1000), {"attached": 9.0}))
        assert (handle.state, handle.spec, handle.group) == (State.WARM, None, None)


class TestMemory:
    def test_the_baseline_is_the_memory_of_the_first_warm_state(self) -> None:
        handle = make_warm()
        handle.warm(Warm(Memory(host=1100), {}))

        assert handle.memory.baseline == Memory(host=1000)
        assert handle.memory.kept == 100

    def test_on_a_gpu_its_memory_counts(self) -> None:
        handle = make_handle()
        handle.warm(Warm(Memory(host=1000, device=400), {}))
        handle.warm(Warm(Memory(host=9000, device=404), {}))

        assert handle.memory.kept == 4

    def test_a_gpu_without_reserved_memory_is_still_a_gpu(self) -> None:
        handle = make_handle()
        handle.warm(Warm(Memory(host=1000, device=0), {}))
        handle.warm(Warm(Memory(host=9000, device=4), {}))

        assert handle.memory.kept == 4

    def test_a_loaded_model_is_no_leak(self) -> None:
        assert make_ready().leak is Verdict.SOUND

    def test_the_remainder_is_compared_with_the_memory_of_the_model(self) -> None:
        # Given a model of 2 GiB, of which half a GiB stays, and then a GiB more
        gib = 1024**3
        handle = make_warm()
        verdicts = []
        for after in (gib // 2, 3 * gib // 2):
            handle.load(ADDER)
            handle.ready(Ready(INFO, Memory(host=after + gib)))
            handle.warm(Warm(Memory(host=after), {"unload": 0.1}))
            verdicts.append(handle.leak)

        # I expect the second remainder to count as a model that stays.
        assert verdicts == [Verdict.SOUND, Verdict.GROSS]

    def test_steady_growth_is_reported(self) -> None:
        handle = make_warm(leak_floor_mib=1.0)
        verdicts = []
        for at in range(1, 8):
            handle.warm(Warm(Memory(host=1000 + at * 1024**2), {"unload": 0.1}))
            verdicts.append(handle.leak)

        assert verdicts == [Verdict.SOUND] * 5 + [Verdict.GROWING] * 2

    def test_a_new_process_has_its_own_baseline(self) -> None:
        handle = make_warm()
        handle.reap()
        assert handle.leak is Verdict.SOUND

        handle.warm(Warm(Memory(host=5000), {}))

        assert (handle.memory.baseline, handle.leak) == (Memory(host=5000), Verdict.SOUND)


class TestHang:
    def test_no_progress_with_pending_work_is_a_hang(self, clock: Clock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=2))
        for _ in range(61):
            assert handle.kill_reason == ""
            clock.now += 1
            handle.note_heartbeat(Heartbeat(progress=5, unfinished=2))

        assert handle.kill_reason == "no progress for 61 s while 2 requests wait"

    def test_progress_is_no_hang(self, clock: Clock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        for step in range(100):
            handle.note_heartbeat(Heartbeat(progress=step, unfinished=2))
            clock.now += 1

        assert handle.kill_reason == ""

    def test_an_idle_process_does_not_hang(self, clock: Clock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        for _ in range(100):
            handle.note_heartbeat(Heartbeat(progress=5, unfinished=0))
            clock.now += 1

        assert handle.kill_reason == ""

    def test_work_after_a_long_idle_time_is_no_hang(self, clock: Clock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=0))
        clock.now += 59
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=0))
        clock.now += 59
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=1))

        assert handle.kill_reason == ""

    def test_each_engine_counts_from_its_own_start(self, clock: Clock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=2))
        handle.warm(WARM)
        handle.load(ADDER)
        handle.ready(Ready(INFO, Memory(host=3000)))
        clock.now += 59
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=1))
        clock.now += 59

        assert handle.kill_reason == ""

    def test_a_process_without_a_sign_of_life_hangs(self, clock: Clock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        clock.now += 61

        assert handle.kill_reason

    def test_a_draining_process_is_watched_too(self, clock: Clock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        handle.drain()
        handle.note_heartbeat(Heartbeat(progress=5, unfinished=1))
        clock.now += 61

        assert handle.kill_reason

    @pytest.mark.parametrize("state", [State.WARMING, State.LOADING, State.UNLOADING])
    def test_a_change_of_state_may_take_longer(self, clock: Clock, state: State) -> None:
        handle = make_handle(start_timeout_s=600.0, hang_timeout_s=60.0)
        handle._enter(state)
        clock.now += 599
        assert handle.kill_reason == ""
        clock.now += 2
        assert handle.kill_reason == f"still {state.value} after 601 s"

    @pytest.mark.parametrize("state", [State.WARMING, State.LOADING, State.UNLOADING])
    def test_a_process_that_sends_signs_of_life_may_take_its_time(
        self, clock: Clock, state: State
    ) -> None:
        """A download, or a compilation, of hours."""
        handle = make_handle(start_timeout_s=600.0)
        handle._enter(state)
        for _ in range(10):
            clock.now += 599
            handle.note_heartbeat(Heartbeat(progress=0, unfinished=0))

        assert handle.kill_reason == ""

    @pytest.mark.parametrize(
        "state",
        [State.DOWN, State.WARM, State.DRAINED, State.ASLEEP, State.ATTACHED, State.STOPPED],
    )
    def test_processes_in_other_states_are_not_killed(self, clock: Clock, state: State) -> None:
        handle = make_handle()
        handle._enter(state)
        clock.now += 10_000

        assert handle.kill_reason == ""

    def test_time_without_a_listener_does_not_count(self, clock: Clock) -> None:
        handle = make_ready(hang_timeout_s=60.0)
        clock.now += 100

        handle.excuse(50.0)

        assert handle.kill_reason == ""
        clock.now += 11
        assert handle.kill_reason


class TestDraining:
    def test_a_drain_may_take_its_grace(self, clock: Clock) -> None:
        handle = make_ready(drain_timeout_s=30.0)
        handle.drain()
        clock.now += 30
        assert not handle.is_overdue
        clock.now += 1
        assert handle.is_overdue

    def test_the_next_drain_has_its_own_time(self, clock: Clock) -> None:
        handle = make_ready(drain_timeout_s=30.0)
        handle.drain()
        clock.now += 31
        handle.unload()
        assert not handle.is_overdue, "it drains no more"

        handle.drain()

        assert not handle.is_overdue


class TestBackoff:
    @pytest.fixture(autouse=True)
    def _no_jitter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("random.random", lambda: 1.0)

    def _die(self, handle: WorkerProcessHandle, clock: Clock, lived_s: float = 1.0) -> float:
        handle._started = clock.now
        clock.now += lived_s
        handle.reap()
        assert handle.state is State.DOWN
        return handle.start_at - clock.now

    def test_pauses_grow_up_to_a_bound(self, clock: Clock) -> None:
        handle = make_handle()
        pauses = [self._die(handle, clock) for _ in range(6)]

        assert pauses == sorted(pauses)
        assert pauses[0] < pauses[1] < pauses[2]
        assert pauses[-1] == 8.0

    def test_a_process_that_has_served_starts_with_the_shortest_pause(self, clock: Clock) -> None:
        handle = make_handle()
        first = self._die(handle, clock)
        for _ in range(5):
            self._die(handle, clock)

        longer = self._die(handle, clock, HEALTHY_S + 1)
        assert longer > first, "a warm-up that takes long and fails is no service"
        handle.warm(WARM)
        assert self._die(handle, clock, HEALTHY_S + 1) == first

    def test_deaths_in_a_row_are_a_crash_loop(self, clock: Clock) -> None:
        handle = make_handle()
        for _ in range(CRASH_LOOP):
            assert not handle.is_in_crash_loop
            self._die(handle, clock)
        assert handle.is_in_crash_loop

        handle._enter(State.WARMING)
        assert not handle.is_in_crash_loop, "it gets another chance"

    def test_deaths_in_service_cost_the_shortest_pause_for_a_while(self, clock: Clock) -> None:
        handle = make_ready()
        pauses = []
        for _ in range(MOST_IN_SERVICE + 3):
            handle._enter(State.READY)
            pauses.append(self._die(handle, clock))
            assert not handle.is_in_crash_loop

        assert len(set(pauses[:MOST_IN_SERVICE])) == 1
        assert pauses[0] < pauses[-3] < pauses[-2]

    def test_a_replacement_is_no_failure(self, clock: Clock) -> None:
        handle = make_handle()
        for _ in range(CRASH_LOOP):
            self._die(handle, clock)

        handle.replace()

        assert self._die(handle, clock) == 0, "no pause"
        assert not handle.is_in_crash_loop


class TestStart:
    @pytest.mark.parametrize("fault", [EOFError("unexpected EOF"), ConnectionRefusedError()])
    def test_a_fork_server_killed_during_a_start_counts_as_a_death(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, fault: Exception
    ) -> None:
        # Given a fork-server that dies before it reports the process that it has started
        handle = make_handle()
        starting = [fault, None]

        def start(process: object) -> None:
            if now := starting.pop(0):
                raise now

        monkeypatch.setattr(worker.host.process_handle._server.Process, "start", start)

        hindrance = handle.start()

        # I expect the process to count as dead.
        assert hindrance
        assert hindrance.said.startswith(type(fault).__name__)
        assert (handle.state, handle.process, handle.pipe) == (State.DOWN, None, None)
        assert handle.start_at > clock.now

        assert handle.start() is None

        assert handle.state is State.WARMING
        handle.pipe.close()


NOBODY = 2**31 - 1  # no process has this id


class DeadProcess:
    """A process that has ended."""

    def __init__(self, exitcode: int, pid: int = NOBODY) -> None:
        self.exitcode = exitcode
        self.pid = pid

    def join(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class TestDeparture:
    @pytest.mark.parametrize(
        ("status", "last_words", "why", "reason"),
        [
            (-signal.SIGKILL, "", "lost", "ended by SIGKILL"),
            (-signal.SIGTERM, "", "lost", "ended by SIGTERM"),
            (-signal.SIGSEGV, "", "crashed", "ended by SIGSEGV"),
            (-signal.SIGABRT, "", "crashed", "ended by SIGABRT"),
            (-signal.SIGKILL, "no progress", "crashed", "ended by SIGKILL: no progress"),
            (1, "RuntimeError: CUDA", "crashed", "exit status 1: RuntimeError: CUDA"),
            (0, "", "crashed", "exit status 0"),
            (255, "", "crashed", "exit status 255"),
        ],
    )
    def test_an_own_exit_and_a_kill_from_outside_are_told_apart(
        self, status: int, last_words: str, why: str, reason: str
    ) -> None:
        handle = make_handle()
        handle.process = DeadProcess(status)
        handle.last_words = last_words

        assert handle.why_exited() == (why, reason)

    def test_all_ranks_of_a_group_end_like_the_one_that_died(self) -> None:
        handle = make_handle()
        handle.process = DeadProcess(-signal.SIGKILL)
        handle.last_words, handle.exit_cause = "rank 1: ended by SIGKILL", "lost"

        assert handle.why_exited() == ("lost", "ended by SIGKILL: rank 1: ended by SIGKILL")

    def test_a_replaced_process_has_left(self) -> None:
        handle = make_handle()
        handle.process = DeadProcess(-signal.SIGKILL)

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
            handle.process = DeadProcess(255, living.pid)

            # I expect it to count as lost, now and later.
            assert handle.why_exited() == ("lost", "its fork-server is gone")
            handle.reap()

            assert living.wait(10.0) == -signal.SIGKILL

    def test_reaping_an_exited_process_kills_nothing(self) -> None:
        handle = make_handle()
        handle.process = DeadProcess(1, os.getpid())

        assert handle.reap() == 1


def test_a_handle_without_a_process_does_nothing() -> None:
    handle = make_handle()

    handle.send(Stop())
    handle.kill()

    assert handle.receive() == []
    assert handle.reap() is None
    assert handle.pid == 0
