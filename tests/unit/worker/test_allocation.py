"""The next step of each device, from the processes of a host and the goals of its devices."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest

from tests.support.pools import PAIR, A, B, make_handle
from worker.engines import Memory, RankGroup
from worker.host.allocation import GiveWay, Goal, Release, Replace, Step, TakeUp, next_steps
from worker.host.leak import READINGS, MemoryReading, Verdict
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.models import ModelSpec

#: Unloaded where other models would sleep.
WAKEFUL = ModelSpec(name="wakeful", path="models/wakeful", sleep_level=0)

_names = (f"w-{number}" for number in itertools.count())


def member(
    state: State, spec: ModelSpec | None = None, device: int = 0, **values
) -> WorkerProcessHandle:
    made = make_handle(device, next(_names), drain_timeout_s=60.0)
    made._enter(state)
    made.spec = spec
    for name, value in values.items():
        setattr(made, name, value)
    return made


def leaking(leak: Verdict, device: int = 0) -> WorkerProcessHandle:
    """A warm process in which models have left memory behind."""
    mib = 1024**2
    made = member(State.WARM, device=device)
    made.memory.note_warm(Memory(host=600 * mib))
    step, took = {
        Verdict.SOUND: (1, 1000),
        Verdict.GROWING: (20, 1000),
        Verdict.GROSS: (600, 1000),
    }[leak]
    for at in range(1, READINGS + 1):
        made.memory.readings.append(MemoryReading((600 + at * step) * mib, took * mib))
    assert made.leak is leak
    return made


def steps(
    members: list[WorkerProcessHandle],
    *goals: Goal | None,
    sleepers: int = 0,
    slots: int = 1,
    suspended: Collection[int] = (),
) -> list[Step]:
    """The next steps if these are all goals of a host."""
    by_device: dict[int, Goal | None] = dict.fromkeys(range(slots))
    for goal in goals:
        by_device |= dict.fromkeys(goal.devices, goal) if goal else {}
    return next_steps(members, by_device, sleepers, suspended)


class TestTakingUp:
    def test_a_process_serves_only_its_device(self) -> None:
        elsewhere, goal = member(State.WARM, device=1), Goal(A, (0,))

        assert steps([member(State.WARMING), elsewhere], goal, slots=2) == []

    @pytest.mark.parametrize("state", [State.DOWN, State.WARMING, State.STOPPED])
    def test_without_a_warm_process_nothing_is_loaded(self, state: State) -> None:
        assert steps([member(state)], Goal(A, (0,))) == []

    def test_a_process_that_is_to_end_takes_nothing(self) -> None:
        doomed, sound, goal = (
            member(State.WARM, is_retiring=True),
            member(State.WARM),
            Goal(A, (0,)),
        )

        assert steps([doomed, sound], goal) == [TakeUp((sound,), goal)]
        assert steps([doomed], goal) == [Replace(doomed)]


class TestGivingWay:
    @pytest.mark.parametrize("state", [State.LOADING, State.DRAINING, State.UNLOADING])
    def test_a_change_of_state_is_waited_for(self, state: State) -> None:
        assert steps([member(state, A), member(State.WARM)], Goal(B, (0,))) == []

    def test_a_goal_that_returns_too_late_is_loaded_again(self) -> None:
        # Given a device that has drained the model that is its goal again
        holder, warm, goal = member(State.DRAINED, A), member(State.WARM), Goal(A, (0,))

        assert steps([holder, warm], goal) == [GiveWay(holder, sleeps=False)]
        holder._enter(State.UNLOADING)
        assert steps([holder, warm], goal) == []

    def test_another_entry_of_the_same_name_is_another_model(self) -> None:
        holder = member(State.READY, A)

        assert steps([holder], Goal(ModelSpec(name="a", path="other"), (0,))) == [Release(holder)]

    def test_devices_do_not_wait_for_each_other(self) -> None:
        slow, warm = member(State.DRAINING, A), member(State.WARM, device=1)
        goals = Goal(B, (0,)), Goal(B, (1,))

        assert steps([slow, warm], *goals, slots=2) == [TakeUp((warm,), goals[1])]


class TestSleep:
    def _sleeps(
        self, holder: WorkerProcessHandle, *others: WorkerProcessHandle, goal: Goal | None = None
    ) -> bool:
        (step,) = steps([holder, *others], goal or Goal(B, (0,)), sleepers=1)
        assert isinstance(step, GiveWay)
        assert step.member is holder
        return step.sleeps

    def test_a_model_sleeps_if_another_process_takes_over(self) -> None:
        assert self._sleeps(member(State.DRAINED, A), member(State.WARM))
        assert self._sleeps(member(State.DRAINED, A), member(State.WARMING))

    def test_a_model_does_not_sleep_if_no_process_takes_over(self) -> None:
        assert not self._sleeps(member(State.DRAINED, A), member(State.DOWN))
        assert not self._sleeps(member(State.DRAINED, A))

    def test_only_as_many_models_sleep_as_the_limit_allows(self) -> None:
        sleeper = member(State.ASLEEP, WAKEFUL)

        assert not self._sleeps(member(State.DRAINED, A), member(State.WARM), sleeper)

    def test_no_model_sleeps_if_the_operator_forbids_it(self) -> None:
        holder = member(State.DRAINED, A)

        assert steps([holder, member(State.WARM)], Goal(B, (0,))) == [GiveWay(holder, sleeps=False)]

    def test_a_model_that_must_not_sleep_is_unloaded(self) -> None:
        assert not self._sleeps(member(State.DRAINED, WAKEFUL), member(State.WARM))

    def test_a_group_does_not_sleep(self) -> None:
        group = RankGroup("address", 0, (0, 1))

        assert not self._sleeps(member(State.DRAINED, PAIR, group=group), member(State.WARM))

    def test_without_a_goal_no_model_sleeps_by_itself(self) -> None:
        holder = member(State.DRAINED, A)

        assert steps([holder, member(State.WARM)], sleepers=1) == [GiveWay(holder, sleeps=False)]

    def test_a_sleeper_with_the_model_wakes_before_another_process_loads_it(self) -> None:
        warm, sleeper, goal = member(State.WARM), member(State.ASLEEP, A), Goal(A, (0,))

        assert steps([warm, sleeper], goal) == [TakeUp((sleeper,), goal)]

    def test_a_sleeper_with_another_model_keeps_sleeping(self) -> None:
        warm, sleeper, goal = member(State.WARM), member(State.ASLEEP, B), Goal(A, (0,))

        assert steps([sleeper, warm], goal) == [TakeUp((warm,), goal)]

    def test_the_first_sleeper_makes_room_if_all_sleep(self) -> None:
        late = member(State.ASLEEP, B, since=200.0)
        early = member(State.ASLEEP, WAKEFUL, since=100.0)

        assert steps([late, early], Goal(A, (0,))) == [GiveWay(early, sleeps=False)]

    def test_a_process_that_is_nearly_warm_is_waited_for(self) -> None:
        sleeper = member(State.ASLEEP, B)

        assert steps([sleeper, member(State.WARMING)], Goal(A, (0,))) == []


class TestGroups:
    def test_a_group_waits_until_all_devices_are_free(self) -> None:
        warm, busy, goal = member(State.WARM), member(State.READY, A, 1), Goal(PAIR, (0, 1))

        assert steps([warm, busy], goal, slots=2) == [Release(busy)]
        busy._enter(State.DRAINING)
        assert steps([warm, busy], goal, slots=2) == []

    def test_a_group_waits_until_all_processes_are_warm(self) -> None:
        members = [member(State.WARM), member(State.WARMING, device=1)]

        assert steps(members, Goal(PAIR, (0, 1)), slots=2) == []

    def test_a_sleeper_makes_room_for_a_group(self) -> None:
        warm, sleeper = member(State.WARM), member(State.ASLEEP, B, 1)

        assert steps([warm, sleeper], Goal(PAIR, (0, 1)), slots=2) == [
            GiveWay(sleeper, sleeps=False)
        ]

    def _group(self, state: State = State.READY) -> list[WorkerProcessHandle]:
        leader = member(state, PAIR, group=RankGroup("address", 0, (0, 1)))
        follower = member(State.ATTACHED, PAIR, 1, group=RankGroup("address", 1, (0, 1)))
        return [leader, follower]

    def test_the_leader_releases_the_whole_group(self) -> None:
        members = self._group()
        assert steps(members, Goal(A, (0,)), slots=2) == [Release(members[0])]

        members[0]._enter(State.DRAINED)
        assert steps(members, Goal(A, (0,)), slots=2) == [GiveWay(members[0], sleeps=False)]

    def test_the_same_model_on_other_devices_is_another_group(self) -> None:
        members = [*self._group(), member(State.WARM, device=2)]

        assert steps(members, Goal(PAIR, (0, 2)), slots=3) == [Release(members[0])]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_group_ends_with_any_process_that_is_to_end(self, rank: int) -> None:
        members, goal = self._group(), Goal(PAIR, (0, 1))
        members[rank].is_retiring = True
        assert steps(members, goal, slots=2) == [Release(members[0])]


class TestReplacing:
    def test_a_leaking_process_without_a_task_is_replaced(self) -> None:
        leaky = leaking(Verdict.GROWING)

        assert steps([leaky, leaking(Verdict.SOUND)]) == [Replace(leaky)]

    def test_a_replacement_waits_for_all_other_steps(self) -> None:
        leaky, goal = leaking(Verdict.GROWING), Goal(A, (1,))
        warm = member(State.WARM, device=1)

        assert steps([leaky, warm], goal, slots=2) == [TakeUp((warm,), goal)]

    def test_a_sound_process_is_preferred(self) -> None:
        leaky, sound = leaking(Verdict.GROWING), leaking(Verdict.SOUND)
        goal = Goal(A, (0,))

        assert steps([leaky, sound], goal) == [TakeUp((sound,), goal)]

    def test_a_model_does_not_wait_for_a_growing_process(self) -> None:
        leaky, goal = leaking(Verdict.GROWING), Goal(A, (0,))

        assert steps([leaky], goal) == [TakeUp((leaky,), goal)]

    def test_a_process_that_kept_a_model_is_replaced_first(self) -> None:
        leaky = leaking(Verdict.GROSS)

        assert steps([leaky], Goal(A, (0,))) == [Replace(leaky)]

    @pytest.mark.parametrize("state", [State.WARM, State.WARMING, State.ASLEEP])
    def test_a_process_that_is_to_end_ends_immediately_if_it_is_idle(self, state: State) -> None:
        doomed = member(state, is_retiring=True)

        assert steps([doomed]) == [Replace(doomed)]

    def test_a_process_that_is_to_end_finishes_its_requests(self) -> None:
        goal = Goal(A, (0,))
        doomed = member(State.READY, A, is_retiring=True)
        assert steps([doomed], goal) == [Release(doomed)]

        doomed._enter(State.DRAINED)
        assert steps([doomed], goal) == [Replace(doomed)]

        overdue = member(State.DRAINING, A, is_retiring=True)
        overdue._entered -= 61.0
        assert steps([overdue], goal) == [Replace(overdue)]


class TestSuspension:
    def test_the_loaded_model_falls_asleep(self) -> None:
        goal = Goal(A, (0,))
        holder = member(State.READY, A)
        assert steps([holder], goal, suspended={0}) == [Release(holder)]

        holder = member(State.DRAINED, A)
        assert steps([holder], goal, suspended={0}) == [GiveWay(holder, sleeps=True)]

    def test_a_group_is_unloaded_because_it_cannot_sleep(self) -> None:
        group = RankGroup("/x", 0, (0, 1))
        leader = member(State.DRAINED, PAIR, group=group)
        follower = member(State.ATTACHED, PAIR, 1, group=RankGroup("/x", 1, (0, 1)))

        found = steps([leader, follower], Goal(PAIR, (0, 1)), slots=2, suspended={0, 1})

        assert found == [GiveWay(leader, sleeps=False)]

    @pytest.mark.parametrize("state", [State.WARM, State.ASLEEP])
    def test_nothing_is_loaded_during_a_suspension(self, state: State) -> None:
        there, goal = member(state, A if state is State.ASLEEP else None), Goal(A, (0,))

        assert steps([there], goal, suspended={0}) == []
        assert steps([there], goal) == [TakeUp((there,), goal)]

    def test_another_model_that_gives_way_still_does(self) -> None:
        holder = member(State.DRAINED, B)

        assert steps([holder], Goal(A, (0,)), suspended={0}) == [GiveWay(holder, sleeps=False)]

    def test_other_devices_are_not_affected(self) -> None:
        warm, goal = member(State.WARM, device=1), Goal(A, (1,))

        assert steps([warm], goal, slots=2, suspended={0}) == [TakeUp((warm,), goal)]


def test_a_process_without_a_successor_ends_whatever_others_do() -> None:
    # Given a device that loads a model again and again, and a process that is to end
    warm = member(State.WARM)
    last = member(State.WARM, device=1, is_last=True, is_retiring=True, process=object())

    goal = Goal(A, (0,))
    assert steps([warm, last], goal, slots=2) == [TakeUp((warm,), goal), Replace(last)]
