"""Commands from the yard: what each means for the pool, and when it has been obeyed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenyard.protocol.commands import Acknowledgement, Command, Verb
from worker.host.allocation import Goal, fits
from worker.host.pool import Pool
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.messages import Profile, ResetPrefixCache
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.control")

#: By the state that a process comes into: what it has obeyed by that.
_OBEYED: dict[State, Verb] = {State.WARM: "unload", State.ASLEEP: "sleep"}
#: What a suspended device does not do.
_OF_MODELS: frozenset[Verb] = frozenset({"load", "unload", "sleep", "wake"})
#: What the end of a process obeys.
_ENDS: frozenset[Verb] = frozenset({"drain", "stop"})


class CommandError(Exception):
    """A command that cannot be obeyed; the message says why."""


@dataclass(frozen=True, slots=True)
class PendingCommand:
    """A command that has been begun."""

    entry: str
    worker: str
    verb: Verb
    whom: Goal | str  # the goal that it set, or the name of the process that has to do it


class CommandHandler:
    """Obeys commands, and says of each what came of it, by ``acknowledge(entry, what)``."""

    def __init__(
        self,
        pool: Pool,
        catalog: Mapping[str, ModelSpec],
        acknowledge: Callable[[str, Acknowledgement], None],
    ) -> None:
        self._pool = pool
        self._catalog = catalog
        self._acknowledge = acknowledge
        self._pending: list[PendingCommand] = []

    def obey(self, entry: str, command: Command) -> None:
        """Begin what is commanded, if it is meant for a worker of this host.

        What ends a process means it under whatever incarnation: it may have become another since
        the command was given.
        """
        for member in self._pool.members:
            is_former = command.verb in _ENDS and command.worker in member.former
            if member.worker == command.worker or is_former:
                log.info("%s: %s %s: %s", command.worker, command.verb, command.model, command.why)
                self._begin(entry, command, member)

    def _begin(self, entry: str, command: Command, member: WorkerProcessHandle) -> None:
        try:
            whom = self._do(command, member)
        except CommandError as error:
            log.warning("%s: %s: %s", command.worker, command.verb, error)
            self._say(entry, command.worker, str(error))
            return
        if whom is None:
            self._say(entry, command.worker, "")
        else:
            self._pending.append(PendingCommand(entry, command.worker, command.verb, whom))

    def _do(self, command: Command, member: WorkerProcessHandle) -> Goal | str | None:
        """Whom the command now waits for; None where it has been obeyed already."""
        if command.verb in _OF_MODELS and member.device in self._pool.suspended:
            raise CommandError("it is suspended; RESUME it first")
        match command.verb:
            case "load":
                return self._load(command, member)
            case "wake":
                return self._wake(member)
            case "unload":
                return self._unload(member)
            case "sleep":
                return self._sleep(command, member)
            case "reset" | "profile":
                return self._tell(command, member)
            case "check":
                raise CommandError("a check is answered elsewhere")
            case "drain" | "stop":
                self._pool.close(member, at_once=command.verb == "stop")
                return member.name if member.process else None

    def _load(self, command: Command, member: WorkerProcessHandle) -> Goal | None:
        spec = self._catalog.get(command.model)
        if spec is None:
            raise CommandError(f"{command.model!r} does not stand in the models file of this host")
        devices = self._devices(spec, command, member)
        return self._aim(spec, devices)

    def _devices(self, spec: ModelSpec, command: Command, member: WorkerProcessHandle) -> list[int]:
        """Those of the command, else the worker's and those with the next numbers."""
        count = len(self._pool.goals)
        following = [(member.device + rank) % count for rank in range(min(spec.ranks, count))]
        devices = command.devices or following
        different = set(devices) & self._pool.goals.keys()
        if not len(devices) == len(different) == spec.ranks:
            raise CommandError(f"{spec.name} takes {spec.ranks} of this host's {count} devices")
        if different & self._pool.closed:
            raise CommandError(f"of the devices {devices} some are closed for good")
        return devices

    def _aim(self, spec: ModelSpec, devices: list[int]) -> Goal | None:
        goal = self._pool.goals[devices[0]]
        if goal is None or goal.spec is not spec or goal.devices != tuple(devices):
            goal = self._pool.aim(spec, devices)
            self._forget_replaced()
        holder = self._pool.holder(devices[0])
        if goal and holder and holder.state is State.READY and fits(holder, goal):
            self._forget_release(holder)
            return None
        return goal

    def _forget_release(self, member: WorkerProcessHandle) -> None:
        """What it was told before, to let go of its model in one way or another, is void."""
        member.sleep_level = 0
        self._settle(
            lambda one: one.whom == member.name and one.verb in ("unload", "sleep"),
            "another command came first",
        )

    def _forget_replaced(self) -> None:
        """Goals that are no goals any more will not be reached."""
        goals = set(self._pool.goals.values())
        self._settle(
            lambda one: isinstance(one.whom, Goal) and one.whom not in goals,
            "another command came first",
        )

    def _wake(self, member: WorkerProcessHandle) -> Goal | None:
        if member.spec is None or member.state not in (State.ASLEEP, State.READY):
            raise CommandError(f"it does not sleep, it is {member.state.value}")
        return self._aim(member.spec, [member.device])

    def _unload(self, member: WorkerProcessHandle) -> str | None:
        if member.state in (State.WARM, State.WARMING):
            return None
        if member.state is State.ASLEEP:
            self._pool.give_way(member)
        else:
            self._forget_release(member)
            self._pool.aim(None, member.group.devices if member.group else [member.device])
            self._forget_replaced()
        return member.name

    def _sleep(self, command: Command, member: WorkerProcessHandle) -> str | None:
        if member.state is State.ASLEEP:
            return None
        if member.state is not State.READY or member.group:
            raise CommandError(f"only a ready worker of one device can sleep, not {member!r}")
        self._pool.put_to_sleep(member, command.level)
        self._forget_replaced()
        return member.name

    def _tell(self, command: Command, member: WorkerProcessHandle) -> str:
        if member.state is not State.READY:
            raise CommandError(f"it is not ready, it is {member.state.value}")
        member.send(ResetPrefixCache() if command.verb == "reset" else Profile(command.start))
        return member.name

    # What came of them

    def reached(self, goal: Goal) -> None:
        """Devices hold what they should."""
        self._settle(lambda one: one.whom is goal)

    def missed(self, goal: Goal, reason: str) -> None:
        """A model cannot be loaded."""
        self._settle(lambda one: one.whom is goal, reason)

    def changed(self, member: WorkerProcessHandle) -> None:
        """A process has come into another state."""
        verb = _OBEYED.get(member.state)
        self._settle(lambda one: one.whom == member.name and one.verb == verb)

    def done(self, member: WorkerProcessHandle) -> None:
        """A process has done something that changes no state."""
        self._settle_next(member, {"reset", "profile"})

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """A process cannot do something; one that cannot sleep is being unloaded."""
        sleeps = member.state is State.UNLOADING
        self._settle_next(member, {"sleep"} if sleeps else {"reset", "profile"}, reason)

    def died(self, member: WorkerProcessHandle, reason: str) -> None:
        """A process has ended, which is what some were told to do."""
        self._settle(lambda one: one.whom == member.name and one.verb in _ENDS)
        self._settle(lambda one: one.whom == member.name, f"the process died: {reason}")

    def _settle_next(self, member: WorkerProcessHandle, verbs: set[Verb], reason: str = "") -> None:
        """A process answers in the order in which it was told."""
        told = (one for one in self._pending if one.whom == member.name and one.verb in verbs)
        oldest = next(told, None)
        self._settle(lambda one: one is oldest, reason)

    def _settle(self, is_meant: Callable[[PendingCommand], bool], reason: str = "") -> None:
        settled = [one for one in self._pending if is_meant(one)]
        self._pending = [one for one in self._pending if one not in settled]
        for one in settled:
            self._say(one.entry, one.worker, reason)

    def _say(self, entry: str, worker: str, reason: str) -> None:
        self._acknowledge(entry, Acknowledgement(worker=worker, done=not reason, reason=reason))
