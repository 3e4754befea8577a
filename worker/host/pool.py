"""The pool of a host: keeps its processes alive and brings its devices to their goals.

It knows nothing of Redis; it reports to its `PoolListener`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

from tokenyard import clock
from tokenyard.broker.outage import Backoff
from tokenyard.process.home import folder_for_sockets, owned_folder
from tokenyard.process.wake_pipe import WakeupPipe
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.scripts.answers import Why
from worker import messages
from worker.engines import RankGroup
from worker.engines.loading import prepare_host
from worker.host.allocation import GiveWay, Goal, Release, Replace, Step, TakeUp, fits, next_steps
from worker.host.diagnosis import FailedStart
from worker.host.fork_server import preload
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.pool")

TICK_S = 0.5
#: How long a process may take to stop before it is killed.
STOP_S = 5.0
#: The level at which suspended engines sleep: they come back with the same weights.
SUSPENDED_LEVEL = 1


class Pool:
    """The processes of one host."""

    def __init__(self, settings: WorkerSettings, listener: PoolListener) -> None:
        self.members = _members(settings)
        self.goals: dict[int, Goal | None] = dict.fromkeys(range(settings.slots))
        #: Devices that are released for a while: their models sleep, or are loaded again later.
        self.suspended: Collection[int] = frozenset()
        #: Paths of checkpoints that replace a model's own weights, by model.
        self.weights: Mapping[str, str] = {}
        #: Devices that are not used again.
        self.closed: set[int] = set()
        #: Interrupts the wait for the processes.
        self.wakeup = WakeupPipe()
        self._settings = settings
        self._listener = listener
        self._watched_at = clock.monotonic()
        self._retries = LoadRetries(settings.backoff_s, settings.max_backoff_s)
        self._groups = PoolGroups(self.members)

    def start(self) -> None:
        """Prepare the host; `run_once` starts the processes."""
        self._groups.start()
        preload(prepare_host(self._settings))

    @property
    def is_closed(self) -> bool:
        """Whether all processes have ended for good."""
        return all(member.state is State.STOPPED for member in self.members)

    def run_once(self) -> None:
        """One turn: start processes that are due, take steps, handle messages."""
        self._start_due()
        self._take_steps()
        self.handle_messages(self._until_due())
        self._watch()

    # Goals

    def aim(self, spec: ModelSpec | None, devices: Sequence[int]) -> Goal | None:
        """Set the goal of devices: this model on all of them together, or none; returns the goal.

        A group that loses one of its devices is unloaded as a whole.
        """
        for device in devices:
            old = self.goals[device]
            for each in old.devices if old else ():
                self.goals[each] = None
        goal = Goal(spec, tuple(devices)) if spec else None
        for device in devices:
            self.goals[device] = goal
            self._retries.forget(device)
        self.wakeup.set()
        return goal

    def retry_now(self, models: Collection[str]) -> None:
        """Try these models again without further pause."""
        self._retries.retry_now(models, self.goals)

    def put_to_sleep(self, member: WorkerProcessHandle, level: int) -> None:
        """Put its engine to sleep and leave the device free."""
        self.aim(None, [member.device])
        member.sleep_level = level

    def recycle(self, member: WorkerProcessHandle) -> None:
        """Replace its process by a new one once it is idle."""
        member.is_retiring = True
        self.wakeup.set()

    def close(self, member: WorkerProcessHandle, *, at_once: bool = False) -> None:
        """End its process for good, ``at_once`` or when its requests are finished.

        If it takes up its device, or is the last process there, the device is closed too.
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
                self._listener.died(one, "left", "it is closed")
                one.stopped()
                self._listener.changed(one)
        if at_once and member.process is not None:
            member.replace()

    def give_way(self, member: WorkerProcessHandle, *, sleeps: bool = False) -> None:
        """Release its model, or only the device; unfinished requests go back."""
        self._listener.gives_way(member)
        level = member.sleep_level or (member.spec.sleep_level if member.spec else 0)
        if level and member.device in self.suspended:
            level = SUSPENDED_LEVEL
        if sleeps and level:
            member.fall_asleep(level)
        else:
            member.unload()
        self._listener.changed(member)

    def holder(self, device: int) -> WorkerProcessHandle | None:
        """The process that takes up a device, or None."""
        awake = (one for one in self.members if one.device == device and one.is_awake)
        return next(awake, None)

    def _take_steps(self) -> None:
        """Take the next steps towards the goals, except for loads that pause after a failure."""
        self._retries.end_pauses()
        sleepers = self._settings.sleepers
        for step in next_steps(self.members, self.goals, sleepers, self.suspended):
            if not (isinstance(step, TakeUp) and self._retries.is_paused(step.goal)):
                self._carry_out(step)

    def _carry_out(self, step: Step) -> None:
        match step:
            case Release(member):
                member.drain()
                self._listener.changed(member)
            case GiveWay(member, sleeps):
                self.give_way(member, sleeps=sleeps)
            case TakeUp(members, goal):
                self._take_up(members, goal)
            case Replace(member) if member.exit_cause is None:  # else it is ending already
                if not member.is_retiring:
                    kept_mib = member.memory.kept / 1024**2
                    log.warning(
                        "%s leaks: %.0f MiB of unloaded models; replaced", member.name, kept_mib
                    )
                member.replace()

    def _take_up(self, members: Sequence[WorkerProcessHandle], goal: Goal) -> None:
        leader = members[0]
        weights = self.weights.get(goal.spec.name, "")
        if leader.state is State.ASLEEP:
            leader.wake()
        elif len(members) > 1:
            self._groups.form(members, goal, weights)
        else:
            leader.load(goal.spec, weights=weights)
        for member in members:
            self._listener.changed(member)

    # Processes

    def _start_due(self) -> None:
        for member in self.members:
            if member.state is State.DOWN and clock.monotonic() >= member.start_at:
                if failure := member.start():
                    self._listener.start_failed(member, failure)
                self._listener.changed(member)

    def _until_due(self) -> float:
        """Seconds until a start or a retry is due, at most one tick."""
        due = [one.start_at for one in self.members if one.state is State.DOWN]
        due += self._retries.due()
        return min(TICK_S, max(0.0, min(due, default=math.inf) - clock.monotonic()))

    def handle_messages(self, timeout_s: float) -> None:
        """Wait for a message, a death or the wakeup pipe, at most so long, and handle it."""
        pipes = [member.pipe for member in self.members if member.pipe is not None]
        pipes += [one.output.pipe for one in self.members if one.output and one.output.pipe]
        deaths = {one.process.sentinel: one for one in self.members if one.process is not None}
        cores = {
            one.core.process.sentinel: one
            for one in self.members
            if one.core is not None and not one.says_why_it_ends
        }
        heard = wait([*pipes, *deaths, *cores, self.wakeup.fileno()], timeout=timeout_s)
        if self.wakeup.fileno() in heard:
            self.wakeup.clear()
        for member in self.members:
            if member.output is not None:
                member.output.pass_on()
            for message in member.receive():
                self._handle(member, message)
        for sentinel, member in deaths.items():
            if sentinel in heard:
                self._on_exit(member)
        for sentinel, member in cores.items():
            if sentinel in heard and member.process is not None and not member.says_why_it_ends:
                member.process.kill()  # it ends by itself, unless it hangs

    def _handle(self, member: WorkerProcessHandle, message: messages.ToController) -> None:
        match message:
            case messages.Warm():
                member.warm(message)
                self._listener.changed(member)
            case messages.Ready(info):
                member.ready(message)
                self._retries.succeeded()
                log.info("%s: engine %s is up with %s", member.name, info.engine, info.model)
                self._listener.serves(member)
            case messages.Asleep():
                member.asleep(message)
                self._listener.changed(member)
            case messages.CommandRefused(reason, None):
                self._refused(member, reason)
            case messages.Heartbeat():
                member.note_heartbeat(message)
                if message.is_worn and not member.is_retiring:
                    log.warning("%s has work that cannot be stopped; to be replaced", member.name)
                    self.recycle(member)
                self._listener.heard(member, message)
            case messages.Drained():
                member.drained()
            case messages.ProcessFailed(reason):
                log.debug("%s: %s", member.name, reason)  # logged again when it has ended
                member.last_words = reason
            case _:
                self._listener.heard(member, message)

    def _refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """Give up a refused load; unload a model that cannot sleep."""
        log.error("%s: %s", member.name, reason)
        if member.state is State.LOADING:
            self._refused_load(member, reason)
            return
        if member.state is State.UNLOADING:
            member.refused()
            member.unload()
            self._listener.changed(member)
            self._listener.refused(member, reason)

    def _refused_load(self, member: WorkerProcessHandle, reason: str) -> None:
        """Give up the load, and replace the process: nobody knows what the load has left in it."""
        goal, followers = self._goal_of(member), self._groups.mates(member)
        if member.spec:
            said = reason.removeprefix(f"{member.spec.name}: ")
            failure = FailedStart("loading the model", said=said, model=member.spec.path)
            self._listener.start_failed(member, failure)
        member.refused()
        self.recycle(member)
        self._listener.changed(member)
        for one in (member, *followers):  # the followers would wait for the leader forever
            one.replace()
        if goal:
            self._give_up(goal, reason)

    def _goal_of(self, member: WorkerProcessHandle) -> Goal | None:
        """The goal that it works towards; None if its device has another one by now."""
        goal = self.goals[member.device]
        return goal if goal and fits(member, goal) else None

    def _give_up(self, goal: Goal, reason: str, *, is_lost: bool = False) -> None:
        if not self._listener.failed(goal, reason, is_lost=is_lost):
            self.aim(None, goal.devices)
        elif not is_lost:
            self._retries.failed(goal)

    def _on_exit(self, member: WorkerProcessHandle) -> None:
        """Handle the death of a process: its requests move on first."""
        why, reason = member.why_exited()
        if member.may_adopt:
            log.warning("%s: process died (%s); the next takes its model over", member.name, reason)
            self._listener.died(member, why, reason)
            if member.adopt():
                self._listener.changed(member)
                return
        if failure := member.failed_start():
            self._listener.start_failed(member, failure)
        was_loading, goal = member.state is State.LOADING, self._goal_of(member)
        self._listener.died(member, why, reason)
        self._groups.end(member, why, reason)
        member.reap()
        if member.state is State.STOPPED:
            log.info("%s: process has ended for good (%s)", member.name, reason)
        else:
            pause = max(0.0, member.start_at - clock.monotonic())
            log.warning("%s: process died (%s); next in %.1f s", member.name, reason, pause)
        self._listener.changed(member)
        if was_loading and goal and why != "left":
            reason = f"the process died while it loaded: {reason}"
            self._give_up(goal, reason, is_lost=why == "lost")

    def _watch(self) -> None:
        """Kill processes that hang."""
        now = clock.monotonic()
        unheard_s, self._watched_at = now - self._watched_at - TICK_S, now
        for member in self.members:
            # After a suspend of the host no engine must look as if it hung.
            if unheard_s > TICK_S:
                member.excuse(unheard_s)
            if reason := member.kill_reason:
                log.error("%s: killed: %s", member.name, reason)
                member.last_words = reason
                member.kill()

    # The end

    def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Let running requests finish, for at most ``grace_s`` and until ``is_hurried``."""
        until = clock.monotonic() + self._settings.grace_s
        for member in self.members:
            if member.state is State.READY:
                member.drain()
                self._listener.changed(member)
        while not is_hurried() and clock.monotonic() < until and self._is_draining():
            self.handle_messages(TICK_S)
            self._watch()

    def _is_draining(self) -> bool:
        return any(member.state is State.DRAINING for member in self.members)

    def stop(self) -> None:
        """Stop the processes; unfinished requests move on; idempotent."""
        for member in self.members:
            member.send(messages.Stop())
            if member.state not in (State.READY, State.DRAINING, State.DRAINED, State.WARM):
                member.kill()
        until = clock.monotonic() + STOP_S
        for member in self.members:
            if member.process is not None:
                member.process.join(max(0.0, until - clock.monotonic()))
                member.kill()
            self._listener.died(member, "left", "stopped")
            if member.process is not None:
                member.reap()
            member.stopped()
        self._groups.stop()


def _members(settings: WorkerSettings) -> list[WorkerProcessHandle]:
    """One process for each device, more for sleeping engines, and the spares."""
    devices = [*range(settings.slots)] * (1 + settings.sleepers)
    devices += [number % settings.slots for number in range(settings.spares)]
    if len(devices) == 1:
        return [WorkerProcessHandle(settings, settings.name, 0)]
    return [
        WorkerProcessHandle(settings, f"{settings.name}-{number}", device)
        for number, device in enumerate(devices)
    ]


class PoolListener(Protocol):
    """Called by the pool, in its thread."""

    def changed(self, member: WorkerProcessHandle) -> None:
        """A process has changed its state."""

    def serves(self, member: WorkerProcessHandle) -> None:
        """An engine is up and may be given work."""

    def gives_way(self, member: WorkerProcessHandle) -> None:
        """A process is about to release its model: its unfinished requests must move on."""

    def died(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        """A process is dead: its requests must move on immediately."""

    def start_failed(self, member: WorkerProcessHandle, failure: FailedStart) -> None:
        """A process died before it was warm, or could not load its model."""

    def failed(self, goal: Goal, reason: str, *, is_lost: bool = False) -> bool:
        """A model could not be loaded; returns whether the pool tries again.

        ``is_lost``: its process was killed from outside, which may be no fault of the model.
        """

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """A process cannot sleep; its model is being unloaded."""

    def heard(self, member: WorkerProcessHandle, message: messages.ToController) -> None:
        """A process has sent a message that does not concern the pool."""


# Groups of processes that run one model together, each as one rank.


class PoolGroups:
    """Forms and ends the groups of a host."""

    def __init__(self, members: Sequence[WorkerProcessHandle]) -> None:
        self._members = members
        self._numbers = itertools.count()
        self._folder: Path | None = None  # of their sockets
        self._opened = contextlib.ExitStack()

    def start(self) -> None:
        """Make the folder in which the ranks find each other."""
        folder = owned_folder("tokenyard-groups-", folder_for_sockets())
        self._folder = self._opened.enter_context(folder)

    def stop(self) -> None:
        """Remove the folder; idempotent."""
        self._opened.close()
        self._folder = None

    def form(self, members: Iterable[WorkerProcessHandle], goal: Goal, weights: str) -> None:
        """Load the goal's model on all of them together; the first leads."""
        if self._folder is None:
            raise RuntimeError("the pool has not been started")
        address = str(self._folder / f"group-{next(self._numbers)}")
        for rank, member in enumerate(members):
            member.load(goal.spec, RankGroup(address, rank, goal.devices), weights)

    def mates(self, member: WorkerProcessHandle) -> list[WorkerProcessHandle]:
        """The other members of its group."""
        return [mate for mate in self._members if mate.is_mate_of(member) and mate is not member]

    def end(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        """Kill the other ranks of its group, which would wait for it forever."""
        rank = member.group.rank if member.group else 0
        for mate in self.mates(member):
            mate.exit_cause = mate.exit_cause or why
            mate.last_words = mate.last_words or f"rank {rank}: {reason}"
            mate.kill()


# When a model that could not be loaded is tried again.


class LoadRetries:
    """Pauses by device, which grow with each failed load of a goal in a row."""

    def __init__(self, base_s: float, cap_s: float) -> None:
        self._retry_at: dict[int, float] = {}  # by device, monotonic
        self._failures: Counter[Goal] = Counter()  # in a row
        self._backoff = Backoff(cap=cap_s, base=base_s)

    def failed(self, goal: Goal) -> None:
        """Pause the devices of a goal whose load failed."""
        self._failures[goal] += 1
        pause_s = self._backoff.compute(self._failures[goal])
        self._retry_at.update(dict.fromkeys(goal.devices, clock.monotonic() + pause_s))

    def succeeded(self) -> None:
        """A model was loaded: pauses no longer grow."""
        self._failures.clear()

    def forget(self, device: int) -> None:
        """A device has a new goal."""
        self._retry_at.pop(device, None)

    def retry_now(self, models: Collection[str], goals: Mapping[int, Goal | None]) -> None:
        """End the pauses of these models."""
        for device in list(self._retry_at):
            goal = goals[device]
            if goal and goal.spec.name in models:
                del self._retry_at[device]
                del self._failures[goal]

    def is_paused(self, goal: Goal) -> bool:
        """Whether a device of this goal pauses."""
        return bool(self._retry_at.keys() & goal.devices)

    def end_pauses(self) -> None:
        """Forget the pauses that are over."""
        now = clock.monotonic()
        self._retry_at = {device: at for device, at in self._retry_at.items() if at > now}

    def due(self) -> Collection[float]:
        """When the pauses end, monotonic."""
        return self._retry_at.values()
