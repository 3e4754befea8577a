"""A slot: what state it is in, and when its process should be killed."""

from __future__ import annotations

import signal

import pytest

import worker.slot
from tokenyard.settings import WorkerSettings
from worker.engines import EngineInfo
from worker.messages import Beat, Stop
from worker.slot import HEALTHY_S, Slot, State

INFO = EngineInfo("simulated", "7", "sim", "", max_model_len=100, vocab_size=50, slots=4)


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
    monkeypatch.setattr(worker.slot, "time", clock)
    return clock


def make_slot(index: int = 0, **values) -> Slot:
    settings = {"name": "w", "engine": "simulated", "backoff_s": 1.0, "max_backoff_s": 8.0}
    return Slot(WorkerSettings(redis_url="redis://x", **(settings | values)), index)


class TestHang:
    def _serving(self, **values) -> Slot:
        slot = make_slot(hang_timeout_s=60.0, **values)
        slot.ready(INFO)
        return slot

    def test_no_progress_while_work_waits(self, clock: Clock) -> None:
        slot = self._serving()
        slot.note_beat(Beat(progress=5, unfinished=2))
        for _ in range(61):
            assert slot.fault == ""
            clock.now += 1
            slot.note_beat(Beat(progress=5, unfinished=2))

        assert slot.fault == "no progress for 61 s while 2 requests wait"

    def test_progress(self, clock: Clock) -> None:
        slot = self._serving()
        for step in range(100):
            slot.note_beat(Beat(progress=step, unfinished=2))
            clock.now += 1

        assert slot.fault == ""

    def test_nothing_to_do(self, clock: Clock) -> None:
        slot = self._serving()
        for _ in range(100):
            slot.note_beat(Beat(progress=5, unfinished=0))
            clock.now += 1

        assert slot.fault == ""

    def test_work_that_comes_after_a_long_rest(self, clock: Clock) -> None:
        slot = self._serving()
        slot.note_beat(Beat(progress=5, unfinished=0))
        clock.now += 59
        slot.note_beat(Beat(progress=5, unfinished=0))
        clock.now += 59
        slot.note_beat(Beat(progress=5, unfinished=1))

        assert slot.fault == ""

    def test_a_process_without_a_sign_of_life(self, clock: Clock) -> None:
        slot = self._serving()
        clock.now += 61

        assert slot.fault

    def test_draining_is_watched_too(self, clock: Clock) -> None:
        slot = self._serving()
        slot.note_beat(Beat(progress=5, unfinished=1))
        slot.state = State.DRAINING
        clock.now += 61

        assert slot.fault

    def test_a_start_may_take_longer(self, clock: Clock) -> None:
        slot = make_slot(start_timeout_s=600.0, hang_timeout_s=60.0)
        slot.state = State.STARTING
        slot._moved = clock.now
        clock.now += 599
        assert slot.fault == ""
        clock.now += 2
        assert slot.fault == "engine not up after 601 s"

    @pytest.mark.parametrize("state", [State.DOWN, State.STOPPED])
    def test_others_are_left_alone(self, clock: Clock, state: State) -> None:
        slot = make_slot()
        slot.state = state
        clock.now += 10_000

        assert slot.fault == ""


class TestBackoff:
    @pytest.fixture(autouse=True)
    def _no_jitter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("random.random", lambda: 1.0)

    def _die(self, slot: Slot, clock: Clock, lived_s: float) -> float:
        slot._started = clock.now
        clock.now += lived_s
        slot.bury()
        assert slot.state is State.DOWN
        return slot.start_at - clock.now

    def test_pauses_grow_up_to_a_bound(self, clock: Clock) -> None:
        slot = make_slot()
        pauses = [self._die(slot, clock, 1.0) for _ in range(6)]

        assert pauses == sorted(pauses)
        assert pauses[0] < pauses[1] < pauses[2]
        assert pauses[-1] == 8.0

    def test_a_process_that_has_served_begins_anew(self, clock: Clock) -> None:
        slot = make_slot()
        first = self._die(slot, clock, 1.0)
        for _ in range(5):
            self._die(slot, clock, 1.0)

        assert self._die(slot, clock, HEALTHY_S + 1) == first


class DeadProcess:
    """A process that has ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode

    def join(self) -> None: ...


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
        ],
    )
    def test_by_itself_or_by_a_hand_from_outside(
        self, status: int, last_words: str, why: str, reason: str
    ) -> None:
        slot = make_slot()
        slot.process = DeadProcess(status)
        slot.last_words = last_words

        assert slot.departure() == (why, reason)

    def test_last_words_are_of_one_process(self) -> None:
        slot = make_slot()
        slot.last_words = "no progress"
        slot.bury()

        assert slot.last_words == ""


class TestRosterEntry:
    def test_what_the_engine_says(self) -> None:
        slot = make_slot(1, slots=2, max_num_seqs=4)
        slot.ready(INFO)

        entry = slot.roster_entry()

        assert (entry.name, entry.state) == ("w-1", "ready")
        assert (entry.model, entry.engine, entry.vocab_size) == ("sim", "simulated", 50)
        assert (entry.slots, entry.lane_limit) == (4, 5)

    def test_draining(self) -> None:
        slot = make_slot()
        slot.ready(INFO)
        slot.state = State.DRAINING

        assert (slot.roster_entry().name, slot.roster_entry().state) == ("w", "draining")

    def test_without_an_engine(self) -> None:
        with pytest.raises(RuntimeError):
            make_slot().roster_entry()


def test_without_a_process_there_is_nothing_to_do() -> None:
    slot = make_slot()

    slot.send(Stop())
    slot.kill()

    assert slot.receive() == []
    assert slot.bury() is None
