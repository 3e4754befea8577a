"""One process of the pool: what state it is in, and when it should be killed or replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import worker.host.process_handle
from tokenyard.protocol.settings import WorkerSettings
from worker.engines import EngineInfo, Group, Memory
from worker.host.leak import Verdict
from worker.host.process_handle import (
    AWAKE,
    CRASH_LOOP,
    HEALTHY_S,
    MOST_IN_SERVICE,
    State,
    WorkerProcessHandle,
)
from worker.messages import Asleep, Heartbeat, Ready, Stop, Warm
from worker.models import ModelSpec

ADDER = ModelSpec(name="adder", path="models/adder")
INFO = EngineInfo(
    "simulated", "7", "adder", "", 100, vocab_size=50, slots=4, phases_s={"weights": 1.5}
)
WARM = Warm(Memory(host=1000), {"import": 2.0})


class Clock:
    """Time as the test wants it."""

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


def make_pooled(device: int = 0, **values) -> WorkerProcessHandle:
    settings = {"name": "w", "engine": "simulated", "backoff_s": 1.0, "max_backoff_s": 8.0}
    return WorkerProcessHandle(
        WorkerSettings(redis_url="redis://x", **(settings | values)), "w", device
    )


def make_warm(**values) -> WorkerProcessHandle:
    pooled = make_pooled(**values)
    pooled.warm(WARM)
    return pooled


def make_ready(**values) -> WorkerProcessHandle:
    pooled = make_warm(**values)
    pooled.load(ADDER)
    pooled.ready(Ready(INFO, Memory(host=3000)))
    return pooled


class TestLife:
    def test_from_warm_to_ready_and_back(self) -> None:
        pooled = make_warm()
        assert (pooled.state, pooled.spec, pooled.phases_s) == (State.WARM, None, {"import": 2.0})

        pooled.load(ADDER)
        assert (pooled.state, pooled.spec, pooled.engine) == (State.LOADING, ADDER, None)

        pooled.ready(Ready(INFO, Memory(host=3000)))
        assert (pooled.state, pooled.engine, pooled.phases_s) == (
            State.READY,
            INFO,
            {"weights": 1.5},
        )

        pooled.drain()
        pooled.drained()
        pooled.unload()
        assert (pooled.state, pooled.spec) == (State.UNLOADING, ADDER)

        pooled.warm(Warm(Memory(host=1001), {"unload": 0.5}))
        assert (pooled.state, pooled.spec, pooled.engine) == (State.WARM, None, None)
        assert pooled.phases_s == {"unload": 0.5}

    def test_sleep_and_wake_keep_the_model(self) -> None:
        pooled = make_ready()
        pooled.sleep_level = 2
        pooled.fall_asleep(2)
        assert (pooled.state, pooled.is_awake) == (State.UNLOADING, True)

        pooled.asleep(Asleep(0.25, Memory(host=1500)))
        assert (pooled.state, pooled.is_awake, pooled.spec) == (State.ASLEEP, False, ADDER)
        assert (pooled.phases_s, pooled.memory) == ({"sleep": 0.25}, Memory(host=1500))

        pooled.wake()
        assert pooled.state is State.LOADING
        pooled.ready(Ready(INFO, Memory(host=3000)))
        assert (pooled.state, pooled.spec, pooled.sleep_level) == (State.READY, ADDER, 0)

    def test_a_load_that_is_refused_leaves_it_warm(self) -> None:
        pooled = make_warm()
        pooled.load(ADDER, Group("a", 0, (0, 1)))

        pooled.refused()

        assert (pooled.state, pooled.spec, pooled.group) == (State.WARM, None, None)

    def test_a_sleep_that_is_refused_leaves_the_model(self) -> None:
        pooled = make_ready()
        pooled.fall_asleep(1)

        pooled.refused()

        assert (pooled.state, pooled.spec) == (State.DRAINED, ADDER)

    def test_word_that_it_is_drained_comes_too_late_when_it_has_gone_on(self) -> None:
        pooled = make_ready()
        pooled.drain()
        pooled.unload()

        pooled.drained()

        assert pooled.state is State.UNLOADING

    def test_since_is_when_it_came_into_its_state(self, clock: Clock) -> None:
        pooled = make_ready()
        pooled.drain()
        since = pooled.since
        clock.now += 5

        pooled.drain()
        assert pooled.since == since
        pooled.unload()
        assert pooled.since == since + 5

    @pytest.mark.parametrize("state", State)
    def test_only_what_has_the_device_is_awake(self, state: State) -> None:
        pooled = make_pooled()
        pooled.state = state

        others = {State.DOWN, State.WARMING, State.WARM, State.ASLEEP, State.STOPPED}
        assert pooled.is_awake == (state not in others)
        assert others.isdisjoint(AWAKE)

    def test_what_a_group_lends_is_the_groups(self) -> None:
        pooled = make_warm()
        group = Group("a", 1, (0, 1))

        pooled.attach(ADDER, group)

        assert (pooled.state, pooled.spec, pooled.group) == (State.ATTACHED, ADDER, group)
        pooled.warm(Warm(Memory(host=1000), {"attached": 9.0}))
        assert (pooled.state, pooled.spec, pooled.group) == (State.WARM, None, None)


class TestMemory:
    def test_the_baseline_is_of_the_first_warmth(self) -> None:
        pooled = make_warm()
        pooled.warm(Warm(Memory(host=1100), {}))

        assert pooled.baseline == Memory(host=1000)
        assert pooled.kept == 100

    def test_on_a_gpu_its_memory_counts(self) -> None:
        pooled = make_pooled()
        pooled.warm(Warm(Memory(host=1000, device=400), {}))
        pooled.warm(Warm(Memory(host=9000, device=404), {}))

        assert pooled.kept == 4

    def test_a_gpu_on_which_nothing_is_held_is_a_gpu(self) -> None:
        pooled = make_pooled()
        pooled.warm(Warm(Memory(host=1000, device=0), {}))
        pooled.warm(Warm(Memory(host=9000, device=4), {}))

        assert pooled.kept == 4

    def test_a_model_is_no_leak(self) -> None:
        assert make_ready().leak is Verdict.SOUND

    def test_what_a_model_took_is_compared_with_what_stays_of_it(self) -> None:
        # Given a model of 2 GiB, of which half a GiB stays, and then a GiB more
        gib = 1024**3
        pooled = make_warm()
        verdicts = []
        for after in (gib // 2, 3 * gib // 2):
            pooled.load(ADDER)
            pooled.ready(Ready(INFO, Memory(host=after + gib)))
            pooled.warm(Warm(Memory(host=after), {"unload": 0.1}))
            verdicts.append(pooled.leak)

        # I expect the second to tell that it clings.
        assert verdicts == [Verdict.SOUND, Verdict.GROSS]

    def test_growth_without_end_is_told(self) -> None:
        pooled = make_warm(leak_floor_mib=1.0)
        verdicts = []
        for at in range(1, 8):
            pooled.warm(Warm(Memory(host=1000 + at * 1024**2), {"unload": 0.1}))
            verdicts.append(pooled.leak)

        assert verdicts == [Verdict.SOUND] * 5 + [Verdict.GROWING] * 2

    def test_a_new_process_has_a_baseline_of_its_own(self) -> None:
        pooled = make_warm()
        pooled.bury()
        assert pooled.leak is Verdict.SOUND

        pooled.warm(Warm(Memory(host=5000), {}))

        assert (pooled.baseline, pooled.leak) == (Memory(host=5000), Verdict.SOUND)


class TestHang:
    def test_no_progress_while_work_waits(self, clock: Clock) -> None:
        pooled = make_ready(hang_timeout_s=60.0)
        pooled.note_beat(Heartbeat(progress=5, unfinished=2))
        for _ in range(61):
            assert pooled.fault == ""
            clock.now += 1
            pooled.note_beat(Heartbeat(progress=5, unfinished=2))

        assert pooled.fault == "no progress for 61 s while 2 requests wait"

    def test_progress(self, clock: Clock) -> None:
        pooled = make_ready(hang_timeout_s=60.0)
        for step in range(100):
            pooled.note_beat(Heartbeat(progress=step, unfinished=2))
            clock.now += 1

        assert pooled.fault == ""

    def test_nothing_to_do(self, clock: Clock) -> None:
        pooled = make_ready(hang_timeout_s=60.0)
        for _ in range(100):
            pooled.note_beat(Heartbeat(progress=5, unfinished=0))
            clock.now += 1

        assert pooled.fault == ""

    def test_work_that_comes_after_a_long_rest(self, clock: Clock) -> None:
        pooled = make_ready(hang_timeout_s=60.0)
        pooled.note_beat(Heartbeat(progress=5, unfinished=0))
        clock.now += 59
        pooled.note_beat(Heartbeat(progress=5, unfinished=0))
        clock.now += 59
        pooled.note_beat(Heartbeat(progress=5, unfinished=1))

        assert pooled.fault == ""

    def test_each_engine_counts_from_its_own_beginning(self, clock: Clock) -> None:
        pooled = make_ready(hang_timeout_s=60.0)
        pooled.note_beat(Heartbeat(progress=5, unfinished=2))
        pooled.warm(WARM)
        pooled.load(ADDER)
        pooled.ready(Ready(INFO, Memory(host=3000)))
        clock.now += 59
        pooled.note_beat(Heartbeat(progress=5, unfinished=1))
        clock.now += 59

        assert pooled.fault == ""

    def test_a_process_without_a_sign_of_life(self, clock: Clock) -> None:
        pooled = make_ready(hang_timeout_s=60.0)
        clock.now += 61

        assert pooled.fault

    def test_draining_is_watched_too(self, clock: Clock) -> None:
        pooled = make_ready(hang_timeout_s=60.0)
        pooled.drain()
        pooled.note_beat(Heartbeat(progress=5, unfinished=1))
        clock.now += 61

        assert pooled.fault

    @pytest.mark.parametrize("state", [State.WARMING, State.LOADING, State.UNLOADING])
    def test_a_change_may_take_longer(self, clock: Clock, state: State) -> None:
        pooled = make_pooled(start_timeout_s=600.0, hang_timeout_s=60.0)
        pooled._enter(state)
        clock.now += 599
        assert pooled.fault == ""
        clock.now += 2
        assert pooled.fault == f"still {state.value} after 601 s"

    @pytest.mark.parametrize("state", [State.WARMING, State.LOADING, State.UNLOADING])
    def test_one_that_is_heard_of_may_take_as_long_as_it_needs(
        self, clock: Clock, state: State
    ) -> None:
        """A download, or a compilation, of hours."""
        pooled = make_pooled(start_timeout_s=600.0)
        pooled._enter(state)
        for _ in range(10):
            clock.now += 599
            pooled.note_beat(Heartbeat(progress=0, unfinished=0))

        assert pooled.fault == ""

    @pytest.mark.parametrize(
        "state",
        [State.DOWN, State.WARM, State.DRAINED, State.ASLEEP, State.ATTACHED, State.STOPPED],
    )
    def test_others_are_left_alone(self, clock: Clock, state: State) -> None:
        pooled = make_pooled()
        pooled._enter(state)
        clock.now += 10_000

        assert pooled.fault == ""

    def test_time_in_which_nobody_listened_does_not_count(self, clock: Clock) -> None:
        pooled = make_ready(hang_timeout_s=60.0)
        clock.now += 100

        pooled.excuse(50.0)

        assert pooled.fault == ""
        clock.now += 11
        assert pooled.fault


class TestDraining:
    def test_it_may_take_so_long(self, clock: Clock) -> None:
        pooled = make_ready(drain_timeout_s=30.0)
        pooled.drain()
        clock.now += 30
        assert not pooled.is_overdue
        clock.now += 1
        assert pooled.is_overdue

    def test_the_next_time_begins_anew(self, clock: Clock) -> None:
        pooled = make_ready(drain_timeout_s=30.0)
        pooled.drain()
        clock.now += 31
        pooled.unload()
        assert not pooled.is_overdue, "it drains no more"

        pooled.drain()

        assert not pooled.is_overdue


class TestBackoff:
    @pytest.fixture(autouse=True)
    def _no_jitter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("random.random", lambda: 1.0)

    def _die(self, pooled: WorkerProcessHandle, clock: Clock, lived_s: float = 1.0) -> float:
        pooled._started = clock.now
        clock.now += lived_s
        pooled.bury()
        assert pooled.state is State.DOWN
        return pooled.start_at - clock.now

    def test_pauses_grow_up_to_a_bound(self, clock: Clock) -> None:
        pooled = make_pooled()
        pauses = [self._die(pooled, clock) for _ in range(6)]

        assert pauses == sorted(pauses)
        assert pauses[0] < pauses[1] < pauses[2]
        assert pauses[-1] == 8.0

    def test_a_process_that_has_served_begins_anew(self, clock: Clock) -> None:
        pooled = make_pooled()
        first = self._die(pooled, clock)
        for _ in range(5):
            self._die(pooled, clock)

        longer = self._die(pooled, clock, HEALTHY_S + 1)
        assert longer > first, "a warm-up that takes long and fails is no service"
        pooled.warm(WARM)
        assert self._die(pooled, clock, HEALTHY_S + 1) == first

    def test_deaths_in_a_row_are_a_crash_loop(self, clock: Clock) -> None:
        pooled = make_pooled()
        for _ in range(CRASH_LOOP):
            assert not pooled.is_in_crash_loop
            self._die(pooled, clock)
        assert pooled.is_in_crash_loop

        pooled._enter(State.WARMING)
        assert not pooled.is_in_crash_loop, "it gets another chance"

    def test_deaths_in_service_cost_the_shortest_pause_for_a_while(self, clock: Clock) -> None:
        pooled = make_ready()
        pauses = []
        for _ in range(MOST_IN_SERVICE + 3):
            pooled._enter(State.READY)
            pauses.append(self._die(pooled, clock))
            assert not pooled.is_in_crash_loop

        assert len(set(pauses[:MOST_IN_SERVICE])) == 1
        assert pauses[0] < pauses[-3] < pauses[-2]

    def test_replacing_it_is_no_failure(self, clock: Clock) -> None:
        pooled = make_pooled()
        for _ in range(CRASH_LOOP):
            self._die(pooled, clock)

        pooled.replace()

        assert self._die(pooled, clock) == 0, "no pause"
        assert not pooled.is_in_crash_loop


class TestStart:
    @pytest.mark.parametrize("fault", [EOFError("unexpected EOF"), ConnectionRefusedError()])
    def test_a_fork_server_that_is_killed_meanwhile(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, fault: Exception
    ) -> None:
        # Given a fork-server that has gone before it says which process it has started
        pooled = make_pooled()
        starting = [fault, None]

        def start(process: object) -> None:
            if now := starting.pop(0):
                raise now

        monkeypatch.setattr(worker.host.process_handle._server.Process, "start", start)

        hindrance = pooled.start()

        # I expect it to count as a process that has died.
        assert hindrance
        assert hindrance.said.startswith(type(fault).__name__)
        assert (pooled.state, pooled.process, pooled.pipe) == (State.DOWN, None, None)
        assert pooled.start_at > clock.now

        assert pooled.start() is None

        assert pooled.state is State.WARMING
        pooled.pipe.close()


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
    def test_by_itself_or_by_a_hand_from_outside(
        self, status: int, last_words: str, why: str, reason: str
    ) -> None:
        pooled = make_pooled()
        pooled.process = DeadProcess(status)
        pooled.last_words = last_words

        assert pooled.departure() == (why, reason)

    def test_of_a_group_all_end_as_the_one_that_died(self) -> None:
        pooled = make_pooled()
        pooled.process = DeadProcess(-signal.SIGKILL)
        pooled.last_words, pooled.end = "rank 1: ended by SIGKILL", "lost"

        assert pooled.departure() == ("lost", "ended by SIGKILL: rank 1: ended by SIGKILL")

    def test_a_replaced_one_has_left(self) -> None:
        pooled = make_pooled()
        pooled.process = DeadProcess(-signal.SIGKILL)

        pooled.replace()

        assert pooled.departure() == ("left", "ended by SIGKILL: replaced")

    def test_what_is_known_is_of_one_process(self) -> None:
        pooled = make_ready()
        pooled.last_words, pooled.end, pooled.is_doomed = "no progress", "lost", True
        pooled.worker, pooled.sleep_level = "w.1", 2

        pooled.bury()

        assert (pooled.last_words, pooled.end, pooled.is_doomed) == ("", None, False)
        assert (pooled.worker, pooled.sleep_level) == ("", 0)
        assert (pooled.spec, pooled.engine, pooled.memory) == (None, None, None)

    def test_a_process_that_only_looks_dead_is_killed(self) -> None:
        # Given a process whose fork-server was killed, so that nobody can say how it ended
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
            pooled = make_pooled()
            pooled.process = DeadProcess(255, living.pid)

            # I expect it to count as lost, and to be so from then on.
            assert pooled.departure() == ("lost", "its fork-server is gone")
            pooled.bury()

            assert living.wait(10.0) == -signal.SIGKILL

    def test_its_own_exit_status_kills_nobody(self) -> None:
        pooled = make_pooled()
        pooled.process = DeadProcess(1, os.getpid())

        assert pooled.bury() == 1


def test_without_a_process_there_is_nothing_to_do() -> None:
    pooled = make_pooled()

    pooled.send(Stop())
    pooled.kill()

    assert pooled.receive() == []
    assert pooled.bury() is None
    assert pooled.pid == 0
