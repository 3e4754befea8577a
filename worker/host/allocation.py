"""The next steps of a host's devices towards their goals: a pure decision.

It is taken again after every change, so no step needs to know the one after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from worker.host.leak import Verdict
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.models import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """A model for one or, together, several devices; the leader's device comes first."""

    spec: ModelSpec
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Let running requests finish before the model is released."""

    member: WorkerProcessHandle


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Unload the model, or put it to sleep."""

    member: WorkerProcessHandle
    sleeps: bool


@dataclass(frozen=True, slots=True)
class TakeUp:
    """Load a model, or wake it if the first member sleeps with it; several form a group."""

    members: tuple[WorkerProcessHandle, ...]  # by rank
    goal: Goal


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace the process: it leaks, or an operator asked for it."""

    member: WorkerProcessHandle


Step = Release | GiveWay | TakeUp | Replace


def next_steps(
    members: Sequence[WorkerProcessHandle],
    goals: Mapping[int, Goal | None],
    sleepers: int,
    suspended: Collection[int] = (),
) -> list[Step]:
    """The next steps on all devices; those in ``suspended`` are released for a while.

    On each device ``sleepers`` engines may sleep beside the active one.
    """
    host = _Host(members, goals, sleepers, suspended)
    steps: list[Step] = []
    for device in goals:
        steps += host.clear(device)
    for goal in dict.fromkeys(goal for goal in goals.values() if goal):
        steps += host.take_up(goal)
    steps += host.end_closed()
    return steps or host.replace_leaking()


class _Host:
    """The processes of a host, by device."""

    def __init__(
        self,
        members: Sequence[WorkerProcessHandle],
        goals: Mapping[int, Goal | None],
        sleepers: int,
        suspended: Collection[int],
    ) -> None:
        self._goals = goals
        self._sleepers = sleepers
        self._suspended = suspended
        self._on: dict[int, list[WorkerProcessHandle]] = {device: [] for device in goals}
        for member in members:
            self._on[member.device].append(member)

    def clear(self, device: int) -> Iterable[Step]:
        """Release a model that the device should not hold."""
        goal = self._goals[device]
        for holder in self._holders(device):
            must_go = device in self._suspended or self._must_end(holder)
            if goal and fits(holder, goal) and not must_go:
                continue
            if holder.state is State.READY:
                yield Release(holder)
            elif holder.state is State.DRAINED or holder.is_overdue:
                yield self._end(holder, goal)

    def _must_end(self, holder: WorkerProcessHandle) -> bool:
        """Whether it, or another member of its group, must end."""
        everybody = (one for members in self._on.values() for one in members)
        doomed = [one for one in everybody if one.is_retiring]
        return any(one is holder or one.is_mate_of(holder) for one in doomed)

    def _end(self, holder: WorkerProcessHandle, goal: Goal | None) -> Step:
        if holder.is_retiring:
            return Replace(holder)
        return GiveWay(holder, sleeps=self._may_sleep(holder, goal))

    def take_up(self, goal: Goal) -> Iterable[Step]:
        """Load or wake the model of a goal once its devices are free."""
        if any(self._holders(device) or device in self._suspended for device in goal.devices):
            return
        members = {device: self._choose(device, goal) for device in goal.devices}
        chosen = [member for member in members.values() if member is not None]
        if len(chosen) == len(members):
            yield TakeUp(tuple(chosen), goal)
        for device, member in members.items():
            if member is None:
                yield from self._rouse(device)

    def _rouse(self, device: int) -> Iterable[Step]:
        """If all processes of a device sleep, unload the one that has slept longest."""
        members = self._on[device]
        if members and all(member.state is State.ASLEEP for member in members):
            yield GiveWay(min(members, key=lambda one: one.since), sleeps=False)

    def end_closed(self) -> Iterable[Step]:
        """End idle processes that none shall follow."""
        for members in self._on.values():
            for member in members:
                if member.is_last and member.process is not None and not member.is_awake:
                    yield Replace(member)

    def replace_leaking(self) -> list[Step]:
        """Replace idle processes that leak."""
        return [
            Replace(member)
            for members in self._on.values()
            for member in members
            if member.leak is not Verdict.SOUND or (member.is_retiring and not member.is_awake)
        ]

    def _holders(self, device: int) -> list[WorkerProcessHandle]:
        return [member for member in self._on[device] if member.is_awake]

    def _choose(self, device: int, goal: Goal) -> WorkerProcessHandle | None:
        """The process of a device for the goal's model; never one with a gross leak."""
        others = [member for member in self._on[device] if not member.is_retiring]
        is_alone = len(goal.devices) == 1
        for member in others:
            if member.state is State.ASLEEP and member.spec is goal.spec and is_alone:
                return member
        warm = [member for member in others if member.state is State.WARM]
        sound = [member for member in warm if member.leak is Verdict.SOUND]
        usable = sound or [member for member in warm if member.leak is not Verdict.GROSS]
        return usable[0] if usable else None

    def _may_sleep(self, holder: WorkerProcessHandle, goal: Goal | None) -> bool:
        """Whether a model may sleep: there is room, and another process to take over."""
        spec = holder.spec
        if holder.sleep_level:
            return True
        if goal and spec is goal.spec and holder.device in self._suspended:
            return not holder.group
        if spec is None or not spec.sleep_level or holder.group or goal is None:
            return False
        others = [member for member in self._on[holder.device] if member is not holder]
        asleep = [one for one in others if one.state is State.ASLEEP and one.spec is not goal.spec]
        heirs = [
            one
            for one in others
            if one.state in (State.WARM, State.WARMING)
            or (one.state is State.ASLEEP and one.spec is goal.spec)
        ]
        return bool(heirs) and len(asleep) < self._sleepers


def fits(holder: WorkerProcessHandle, goal: Goal) -> bool:
    """Whether it holds the goal's model, or is about to."""
    is_leaving = holder.state in (State.DRAINING, State.DRAINED, State.UNLOADING)
    return holder.spec is goal.spec and holder.devices == goal.devices and not is_leaving
