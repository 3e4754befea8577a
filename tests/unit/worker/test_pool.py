"""The pool: its orders to processes, its calls to its owner, and when they happen."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import worker.host.pool
from tests.support.fake_clock import FakeClock
from tests.support.pools import MEMORY, PAIR, A, B, Theatre, engine_info, theatre
from worker.host.pool import TICK_S
from worker.host.process_state import State
from worker.messages import (
    Asleep,
    CommandRefused,
    Drain,
    Drained,
    LoadModel,
    Ready,
    Sleep,
    Stop,
    Unload,
    Wake,
    Warm,
)
from worker.models import ModelSpec


@pytest.mark.parametrize(
    ("values", "devices"),
    [
        pytest.param({"slots": 2}, [0, 1], id="one for each device"),
        pytest.param({"slots": 2, "spares": 3}, [0, 1, 0, 1, 0], id="spares are spread"),
        pytest.param(
            {"slots": 2, "sleepers": 2, "spares": 1}, [0, 1, 0, 1, 0, 1, 0], id="sleepers of each"
        ),
    ],
)
def test_processes_are_started_on_the_devices(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, int], devices: list[int]
) -> None:
    with theatre(monkeypatch, **values) as played:
        played.turn()

        members = played.pool.members
        assert [member.name for member in members] == [f"w-{at}" for at in range(len(devices))]
        assert [played.process(member.name).device for member in members] == devices
        assert {member.state for member in members} == {State.WARMING}


class TestWaits:
    @pytest.fixture
    def now(self, fake_clock: FakeClock) -> float:
        """The time of the pool, which stands still."""
        return fake_clock.monotonic()

    def test_nothing_is_due_while_all_processes_run(self, two: Theatre) -> None:
        assert two.pool._until_due() == TICK_S

    def test_the_next_start_ends_the_wait(self, two: Theatre, now: float) -> None:
        other = two.member("w-1")
        two.process("w-1").end(1)
        two.turn()
        other.start_at = now + TICK_S / 2

        assert 0 < two.pool._until_due() <= TICK_S / 2
        # A distant start does not make the tick longer, and a past one not negative.
        other.start_at = now + 60
        assert two.pool._until_due() == TICK_S
        other.start_at = 0.0
        assert two.pool._until_due() == 0.0

    def test_the_next_try_of_a_load_ends_the_wait_too(self, two: Theatre, now: float) -> None:
        two.pool._retries._retry_at[0] = now + TICK_S / 2

        assert 0 < two.pool._until_due() <= TICK_S / 2


class TestGoals:
    def test_a_swap_happens_in_the_same_process(self, two: Theatre) -> None:
        # Given a device with a model, whose goal is another one
        two.hold(A, 0)
        two.pool.aim(B, [0])

        # I expect it to drain first, then to be given up by its owner, and then to unload,
        assert two.turn() == []
        assert two.heard("w-0") == [Drain()]
        assert two.say("w-0", Drained()) == [("gives way", "w-0", State.DRAINED)]
        assert two.heard("w-0") == [Unload()]

        # and the other to load.
        two.say("w-0", Warm(MEMORY, {"unload": 0.1}))
        assert two.heard("w-0") == [LoadModel(B)]
        assert two.say("w-0", Ready(engine_info(B), MEMORY)) == [("serves", "w-0")]

    def test_a_new_goal_does_not_wait_for_the_pause_of_the_old_one(self, one: Theatre) -> None:
        one.owner.goes_on_trying = True
        one.aim(A, 0)
        one.say("w-0", CommandRefused("no such file"))

        one.aim(B, 0)

        assert one.heard("w-1") == [LoadModel(B)]


class TestSleep:
    @pytest.fixture
    def sleepy(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Theatre]:
        with theatre(monkeypatch, sleepers=1) as played:
            played.warm_up()
            yield played

    def test_models_change_places(self, sleepy: Theatre) -> None:
        # Given a device that has held both models
        sleepy.hold(A, 0)
        sleepy.aim(B, 0)
        sleepy.say("w-0", Drained())
        assert sleepy.heard("w-0") == [Drain(), Sleep(1)]
        sleepy.say("w-0", Asleep(0.1, MEMORY))
        assert sleepy.heard("w-1") == [LoadModel(B)]
        sleepy.say("w-1", Ready(engine_info(B), MEMORY))

        # If the first becomes its goal again
        sleepy.aim(A, 0)
        sleepy.say("w-1", Drained())
        sleepy.say("w-1", Asleep(0.1, MEMORY))

        # I expect one to sleep and the other to wake.
        assert sleepy.heard("w-1") == [Drain(), Sleep(1)]
        assert sleepy.heard("w-0") == [Wake()]

    def test_the_model_sets_the_level_of_its_sleep(self, sleepy: Theatre) -> None:
        deep = ModelSpec(name="deep", path="models/deep", sleep_level=2)
        sleepy.hold(deep, 0)
        sleepy.aim(B, 0)
        sleepy.say("w-0", Drained())

        assert sleepy.heard("w-0") == [Drain(), Sleep(2)]


class TestGroups:
    def test_a_group_has_one_process_of_each_device(self, two: Theatre) -> None:
        two.aim(PAIR, 1, 0)

        (load,), (attach,) = two.heard("w-1"), two.heard("w-0")
        assert isinstance(load, LoadModel)
        assert isinstance(attach, LoadModel)
        assert load.spec == PAIR
        assert (load.group.rank, attach.group.rank) == (0, 1)
        assert load.group.address == attach.group.address
        assert load.group.devices == attach.group.devices == (1, 0)
        assert two.member("w-0").state is State.ATTACHED

    def test_each_group_has_its_own_address(self, two: Theatre) -> None:
        addresses = set()
        for _ in range(2):
            two.aim(PAIR, 0, 1)
            group = two.member("w-0").group
            addresses.add(group.address)
            two.say("w-0", Ready(engine_info(PAIR), MEMORY))
            two.aim(None, 0, 1)
            two.say("w-0", Drained())
            two.say("w-0", Warm(MEMORY, {}))
            two.say("w-1", Warm(MEMORY, {}))

        assert len(addresses) == 2

    @pytest.mark.parametrize(("dies", "stays"), [("w-0", "w-1"), ("w-1", "w-0")])
    def test_a_group_ends_with_any_of_its_ranks(self, two: Theatre, dies: str, stays: str) -> None:
        two.hold(PAIR, 0, 1)

        two.process(dies).kill()

        # I expect the other to end in the same way: it was lost, and crashed nothing.
        first, second = two.turn()
        assert first == ("died", dies, "lost", "ended by SIGKILL")
        assert second[:3] == ("died", stays, "lost")
        assert two.pool.goals[0], "it is to be formed again"

    def test_a_rank_that_crashes_during_a_load_is_a_failed_load(self, two: Theatre) -> None:
        two.aim(PAIR, 0, 1)

        two.process("w-1").end(-signal.SIGSEGV)

        told = two.turn()
        assert [one[:3] for one in told[:2]] == [
            ("died", "w-1", "crashed"),
            ("died", "w-0", "crashed"),
        ]
        assert told[2][:2] == ("failed", "pair")
        assert two.pool.goals == {0: None, 1: None}

    def test_a_group_that_loses_a_device_is_unloaded(self, two: Theatre) -> None:
        two.hold(PAIR, 0, 1)

        goal = two.pool.aim(A, [1])

        assert two.pool.goals == {0: None, 1: goal}
        two.turn()
        assert two.heard("w-0") == [Drain()]


class TestNews:
    def test_a_refusal_that_comes_too_late_changes_nothing(self, two: Theatre) -> None:
        two.hold(PAIR, 0, 1)

        assert two.say("w-0", CommandRefused("no sleep mode")) == []
        assert [one.state for one in two.pool.members] == [State.READY, State.ATTACHED]


class TestShutdown:
    def test_a_drain_may_be_hurried(self, two: Theatre) -> None:
        two.hold(A, 0)

        two.pool.drain(lambda: True)

        assert two.member("w-0").state is State.DRAINING

    @pytest.mark.parametrize("grace_s", [0.0, 60.0])
    def test_a_drain_ends_with_its_grace(
        self, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch, grace_s: float
    ) -> None:
        monkeypatch.setattr(worker.host.pool, "TICK_S", 0.0)
        with theatre(monkeypatch, grace_s=grace_s) as played:
            played.warm_up()
            played.hold(A, 0)
            began, fake_clock.ticks_s = fake_clock.now, 1.0

            played.pool.drain(lambda: False)

            assert grace_s <= fake_clock.now - began <= grace_s + 10.0
            assert played.member("w").state is State.DRAINING

    def test_all_processes_are_told_and_given_up(self, two: Theatre) -> None:
        two.hold(A, 0)
        process = two.process("w-0")
        heard = []
        two.owner.died = lambda member, why, reason: heard.append((member.name, why))

        two.pool.stop()
        two.pool.stop()

        assert heard[:2] == [("w-0", "left"), ("w-1", "left")]
        assert process.exitcode is not None
        assert {member.state for member in two.pool.members} == {State.STOPPED}

    def test_a_process_is_told_before_it_is_given_up(
        self, two: Theatre, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        two.hold(A, 0)
        heard = []
        process = two.process("w-0")
        monkeypatch.setattr(process, "kill", lambda: heard.extend(process.heard()))

        two.pool.stop()

        assert heard == [Stop()]
        process.end(0)

    def test_a_process_that_is_down_is_given_up_too(self, two: Theatre) -> None:
        two.process("w-1").end(1)
        two.turn()

        two.pool.stop()

        assert ("died", "w-1", "left", "stopped") in two.owner.told
