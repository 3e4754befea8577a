"""The pool of a host: keeps its processes alive and brings its devices to their goals.

It knows nothing of Redis. Whoever owns it is told what happens, and is asked before a model goes.
"""

from __future__ import annotations

import itertools
import logging
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

from redis.backoff import ExponentialWithJitterBackoff

from tokenyard.process.wake_pipe import WakeupPipe
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.scripts import Why
from worker.engines import Group
from worker.engines.host import prepare_host
from worker.host.allocation import (
    GiveWay,
    Goal,
    Release,
    Replace,
    Rules,
    Step,
    TakeUp,
    fits,
    next_steps,
)
from worker.host.diagnosis import FailedStart
from worker.host.fork_server import preload
from worker.host.process_handle import State, WorkerProcessHandle
from worker.messages import (
    Asleep,
    CommandRefused,
    Drained,
    Heartbeat,
    ProcessFailed,
    Ready,
    Stop,
    ToController,
    Warm,
)
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.pool")

TICK_S = 0.5
#: Time for a process that was told to stop to do so before it is killed.
STOP_S = 5.0
#: At which suspended engines sleep: they come back as they were, with whatever weights they had.
SUSPENDED_LEVEL = 1


class PoolListener(Protocol):
    """Who is told what happens in a pool."""

    def changed(self, member: WorkerProcessHandle) -> None:
        """It has come into another state."""

    def serves(self, member: WorkerProcessHandle) -> None:
        """Its engine is up: it may be given work."""

    def gives_way(self, member: WorkerProcessHandle) -> None:
        """It is about to let go of its model: what it has left must be somebody else's."""

    def died(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        """Its process is dead: what it had must be somebody else's at once."""

    def start_failed(self, member: WorkerProcessHandle, death: FailedStart) -> None:
        """Its process died before it was warm, or it, or its process, could not load its model."""

    def failed(self, goal: Goal, reason: str) -> bool:
        """A model could not be loaded; whether the pool shall go on trying."""

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """It cannot do something that has nothing to do with a goal."""

    def heard(self, member: WorkerProcessHandle, message: ToController) -> None:
        """It said something that is not the pool's business."""


class Pool:
    """The processes of one host."""

    def __init__(self, settings: WorkerSettings, owner: PoolListener) -> None:
        self.members = _members(settings)
        self.goals: dict[int, Goal | None] = dict.fromkeys(range(settings.slots))
        #: Devices that are let go of for a while: what they held sleeps, or is loaded again.
        self.suspended: Collection[int] = frozenset()
        #: By model: the path of a checkpoint that stands in for its own.
        self.weights: Mapping[str, str] = {}
        #: Devices that are never taken up again.
        self.closed: set[int] = set()
        #: Interrupts the wait for the processes.
        self.wakeup = WakeupPipe()
        self._settings = settings
        self._owner = owner
        self._rules = Rules(settings.sleepers)
        self._looked_at = time.monotonic()  # when the processes were last judged
        self._retry_at: dict[int, float] = {}  # by device, after a load that failed
        self._faults: Counter[Goal] = Counter()  # in a row
        self._backoff = ExponentialWithJitterBackoff(
            cap=settings.max_backoff_s, base=settings.backoff_s
        )
        self._groups = itertools.count()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Prepare the host; `run_once` starts the processes."""
        self._folder = tempfile.TemporaryDirectory(prefix="tokenyard-")
        preload(prepare_host(self._settings))

    @property
    def is_closed(self) -> bool:
        """Whether all processes have ended for good."""
        return all(member.state is State.STOPPED for member in self.members)

    def run_once(self) -> None:
        """One turn: start what is due, move on, hear what happened."""
        self._start_due()
        self._move_on()
        self.hear(self._until_due())
        self._watch()

    # Goals

    def aim(self, spec: ModelSpec | None, devices: Sequence[int]) -> Goal | None:
        """Devices should hold this model from now on, together; or none; the new goal.

        A group that loses one of its devices is given up as a whole.
        """
        for device in devices:
            old = self.goals[device]
            for each in old.devices if old else ():
                self.goals[each] = None
        goal = Goal(spec, tuple(devices)) if spec else None
        for device in devices:
            self.goals[device] = goal
            self._retry_at.pop(device, None)
        self.wakeup.set()
        return goal

    def retry_now(self, models: Collection[str]) -> None:
        """Do not wait any longer before these models are tried again."""
        for device in list(self._retry_at):
            goal = self.goals[device]
            if goal and goal.spec.name in models:
                del self._retry_at[device]
                del self._faults[goal]

    def put_to_sleep(self, member: WorkerProcessHandle, level: int) -> None:
        """Its engine should let go of the device, and nothing else take it."""
        self.aim(None, [member.device])
        member.sleep_level = level

    def recycle(self, member: WorkerProcessHandle) -> None:
        """Its process should end once it has nothing to do, and a new one start."""
        member.is_doomed = True
        self.wakeup.set()

    def close(self, member: WorkerProcessHandle, *, at_once: bool = False) -> None:
        """End its process for good: at once, or when it has finished what it has.

        With a process that takes up its device, or is the last one there, the device is closed.
        """
        leaving = [member]
        mates = [one for one in self.members if one.device == member.device]
        if member.is_awake or all(one is member or one.is_last for one in mates):
            self.aim(None, [member.device])
            self.closed.add(member.device)
            leaving = mates
        for one in leaving:
            one.is_last = True
            self.recycle(one)
            if one.process is None:
                self._close_without_process(one)
        if at_once and member.process is not None:
            member.replace()

    def _close_without_process(self, member: WorkerProcessHandle) -> None:
        self._owner.died(member, "left", "it is closed")
        member.stopped()
        self._owner.changed(member)

    def give_way(self, member: WorkerProcessHandle, *, sleeps: bool = False) -> None:
        """Let go of its model, or of the device only; what is still running goes back."""
        self._owner.gives_way(member)
        level = member.sleep_level or (member.spec.sleep_level if member.spec else 0)
        if level and member.device in self.suspended:
            level = SUSPENDED_LEVEL
        if sleeps and level:
            member.fall_asleep(level)
        else:
            member.unload()
        self._owner.changed(member)

    def holder(self, device: int) -> WorkerProcessHandle | None:
        """The process that takes up a device."""
        awake = (one for one in self.members if one.device == device and one.is_awake)
        return next(awake, None)

    def _move_on(self) -> None:
        """Take the next steps towards the goals, but for models that have just failed to load."""
        now = time.monotonic()
        self._retry_at = {device: at for device, at in self._retry_at.items() if at > now}
        for step in next_steps(self.members, self.goals, self._rules, self.suspended):
            if not (isinstance(step, TakeUp) and self._retry_at.keys() & step.goal.devices):
                self._take(step)

    def _take(self, step: Step) -> None:
        match step:
            case Release(member):
                member.drain()
                self._owner.changed(member)
            case GiveWay(member, sleeps):
                self.give_way(member, sleeps=sleeps)
            case TakeUp(members, goal):
                self._take_up(members, goal)
            case Replace(member) if member.end is None:  # else it is about to end
                if not member.is_doomed:
                    kept_mib = member.kept / 1024**2
                    log.warning(
                        "%s keeps %.0f MiB of models that are gone: replaced", member.name, kept_mib
                    )
                member.replace()

    def _take_up(self, members: Sequence[WorkerProcessHandle], goal: Goal) -> None:
        leader, *followers = members
        if leader.state is State.ASLEEP:
            leader.wake()
        elif followers:
            self._form(leader, followers, goal)
        else:
            leader.load(goal.spec, weights=self.weights.get(goal.spec.name, ""))
        for member in members:
            self._owner.changed(member)

    def _form(
        self, leader: WorkerProcessHandle, followers: Sequence[WorkerProcessHandle], goal: Goal
    ) -> None:
        if self._folder is None:
            raise RuntimeError("the pool has not been started")
        address = str(Path(self._folder.name) / f"group-{next(self._groups)}")
        for rank, member in enumerate(followers, start=1):
            member.attach(goal.spec, Group(address, rank, goal.devices))
        group = Group(address, 0, goal.devices)
        leader.load(goal.spec, group, self.weights.get(goal.spec.name, ""))

    # Processes

    def _start_due(self) -> None:
        for member in self.members:
            if member.state is State.DOWN and time.monotonic() >= member.start_at:
                if hindrance := member.start():
                    self._owner.start_failed(member, hindrance)
                self._owner.changed(member)

    def _until_due(self) -> float:
        """Seconds until something has to be started or tried again, at most one tick."""
        due = [one.start_at for one in self.members if one.state is State.DOWN]
        due += self._retry_at.values()
        return min(TICK_S, max(0.0, min(due, default=math.inf) - time.monotonic()))

    def hear(self, timeout_s: float) -> None:
        """Wait for a message, a death or the bell, at most so long, and act on it."""
        pipes = [member.pipe for member in self.members if member.pipe is not None]
        pipes += [one.output.pipe for one in self.members if one.output and one.output.pipe]
        deaths = {one.process.sentinel: one for one in self.members if one.process is not None}
        heard = wait([*pipes, *deaths, self.wakeup.fileno()], timeout=timeout_s)
        if self.wakeup.fileno() in heard:
            self.wakeup.clear()
        for member in self.members:
            if member.output is not None:
                member.output.pass_on()
            for message in member.receive():
                self._handle_signal(member, message)
        for sentinel, member in deaths.items():
            if sentinel in heard:
                self._on_exit(member)

    def _handle_signal(self, member: WorkerProcessHandle, message: ToController) -> None:
        match message:
            case Warm():
                member.warm(message)
                self._owner.changed(member)
            case Ready(info):
                member.ready(message)
                self._faults.clear()
                log.info("%s: engine %s is up with %s", member.name, info.engine, info.model)
                self._owner.serves(member)
            case Asleep():
                member.asleep(message)
                self._owner.changed(member)
            case CommandRefused(reason, None):
                self._refused(member, reason)
            case Heartbeat():
                member.note_beat(message)
                self._owner.heard(member, message)
            case Drained():
                member.drained()
            case ProcessFailed(reason):
                log.debug("%s: %s", member.name, reason)  # said again when it has ended
                member.last_words = reason
            case _:
                self._owner.heard(member, message)

    def _refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """One that cannot sleep is unloaded."""
        log.error("%s: %s", member.name, reason)
        if member.state is State.LOADING:
            self._refused_load(member, reason)
            return
        if member.state is State.UNLOADING:
            member.refused()
            member.unload()
            self._owner.changed(member)
        self._owner.refused(member, reason)

    def _refused_load(self, member: WorkerProcessHandle, reason: str) -> None:
        """The model is given up; the process is as warm as it was."""
        goal, followers = self._goal_of(member), self._mates(member)
        if member.spec:
            said = reason.removeprefix(f"{member.spec.name}: ")
            death = FailedStart("loading the model", said=said, model=member.spec.path)
            self._owner.start_failed(member, death)
        member.refused()
        self._owner.changed(member)
        for follower in followers:  # they wait for a leader that does not come
            follower.replace()
        if goal:
            self._give_up(goal, reason)

    def _goal_of(self, member: WorkerProcessHandle) -> Goal | None:
        """What it works towards; None where its device should hold something else by now."""
        goal = self.goals[member.device]
        return goal if goal and fits(member, goal) else None

    def _give_up(self, goal: Goal, reason: str) -> None:
        if self._owner.failed(goal, reason):
            self._faults[goal] += 1
            pause_s = self._backoff.compute(self._faults[goal])
            self._retry_at.update(dict.fromkeys(goal.devices, time.monotonic() + pause_s))
        else:
            self.aim(None, goal.devices)

    def _on_exit(self, member: WorkerProcessHandle) -> None:
        """A process has died: its work is given up before anything else."""
        why, reason = member.departure()
        if death := member.death():
            self._owner.start_failed(member, death)
        was_loading, goal = member.state is State.LOADING, self._goal_of(member)
        self._owner.died(member, why, reason)
        self._end_group(member, why, reason)
        member.bury()
        if member.state is State.STOPPED:
            log.info("%s: process has ended for good (%s)", member.name, reason)
        else:
            pause = max(0.0, member.start_at - time.monotonic())
            log.warning("%s: process died (%s); next in %.1f s", member.name, reason, pause)
        self._owner.changed(member)
        if was_loading and goal and why == "crashed":
            self._give_up(goal, f"the process died while it loaded: {reason}")

    def _end_group(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        """One rank is gone, so the others wait for it in vain."""
        rank = member.group.rank if member.group else 0
        for mate in self._mates(member):
            mate.end = mate.end or why
            mate.last_words = mate.last_words or f"rank {rank}: {reason}"
            mate.kill()

    def _mates(self, member: WorkerProcessHandle) -> list[WorkerProcessHandle]:
        """The others of its group."""
        return [mate for mate in self.members if mate.is_mate_of(member) and mate is not member]

    def _watch(self) -> None:
        """Kill what hangs."""
        now = time.monotonic()
        unheard_s, self._looked_at = now - self._looked_at - TICK_S, now
        for member in self.members:
            # A host that was suspended must not find all its engines hanging.
            if unheard_s > TICK_S:
                member.excuse(unheard_s)
            if member.fault:
                log.error("%s: killed: %s", member.name, member.fault)
                member.last_words = member.fault
                member.kill()

    # The end

    def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Let running requests finish, for at most the grace, unless it is hurried."""
        until = time.monotonic() + self._settings.grace_s
        for member in self.members:
            if member.state is State.READY:
                member.drain()
                self._owner.changed(member)
        while not is_hurried() and time.monotonic() < until and self._is_draining():
            self.hear(TICK_S)
            self._watch()

    def _is_draining(self) -> bool:
        return any(member.state is State.DRAINING for member in self.members)

    def stop(self) -> None:
        """Stop the processes; what they have left is given up; idempotent."""
        for member in self.members:
            member.send(Stop())
            if member.state not in (State.READY, State.DRAINING, State.DRAINED, State.WARM):
                member.kill()
        until = time.monotonic() + STOP_S
        for member in self.members:
            if member.process is not None:
                member.process.join(max(0.0, until - time.monotonic()))
                member.kill()
            self._owner.died(member, "left", "stopped")
            if member.process is not None:
                member.bury()
            member.stopped()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _members(settings: WorkerSettings) -> list[WorkerProcessHandle]:
    """One process for each device, those for engines that sleep, and the spares."""
    devices = [*range(settings.slots)] * (1 + settings.sleepers)
    devices += [number % settings.slots for number in range(settings.spares)]
    if len(devices) == 1:
        return [WorkerProcessHandle(settings, settings.name, 0)]
    return [
        WorkerProcessHandle(settings, f"{settings.name}-{number}", device)
        for number, device in enumerate(devices)
    ]
