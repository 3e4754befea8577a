"""Commands of the yard: how they are read, what each does to the pool, and when it is done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenyard.protocol.control import Command, Order, Verb, parse_command, parse_order
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.settings import WorkerSettings
from worker.engines import Unsupported
from worker.engines.loading import check_weights
from worker.host.allocation import Goal, fits
from worker.host.pool import Pool
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.models import ModelSpec
from worker.process.stream_reader import StreamReader

log = logging.getLogger("tokenyard.worker.control")

#: The command that a process completes by entering a state.
_COMPLETES: dict[State, Verb] = {State.WARM: "unload", State.ASLEEP: "sleep"}
#: Commands that a suspended device refuses.
_OF_MODELS: frozenset[Verb] = frozenset({"load", "unload", "sleep", "wake"})
#: Commands that the end of a process completes.
_ENDS: frozenset[Verb] = frozenset({"drain", "stop"})
#: Commands for a process that may have become another incarnation since they were sent.
_OF_PROCESSES: frozenset[Verb] = _ENDS | {"check"}


class CommandError(Exception):
    """A command that cannot be run; the message says why."""


@dataclass(frozen=True, slots=True)
class PendingCommand:
    """A command in progress."""

    entry: str
    worker: str
    verb: Verb
    target: Goal | str  # the goal that it set, or the process that runs it


class CommandHandler:
    """Runs commands and reports the outcome of each.

    ``acknowledge(entry, worker, reason)`` reports it; the reason is empty if the command is done.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        pool: Pool,
        catalog: Mapping[str, ModelSpec],
        acknowledge: Callable[[str, str, str], None],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._catalog = catalog
        self._acknowledge = acknowledge
        self._pending: list[PendingCommand] = []

    def run(self, entry: str, command: Command) -> None:
        """Begin a command, if it is for a worker of this host."""
        for member in self._pool.members:
            is_former = command.verb in _OF_PROCESSES and command.worker in member.former
            if member.worker == command.worker or is_former:
                log.info("%s: %s %s: %s", command.worker, command.verb, command.model, command.why)
                self._begin(entry, command, member)

    def _begin(self, entry: str, command: Command, member: WorkerProcessHandle) -> None:
        if command.verb == "check":  # in a thread of its own: a file system may be slow
            threading.Thread(
                target=self._check, args=(entry, command), name="check", daemon=True
            ).start()
            return
        try:
            target = self._do(command, member)
        except CommandError as error:
            log.warning("%s: %s: %s", command.worker, command.verb, error)
            self._acknowledge(entry, command.worker, str(error))
            return
        if target is None:
            self._acknowledge(entry, command.worker, "")
        else:
            self._pending.append(PendingCommand(entry, command.worker, command.verb, target))

    def _do(self, command: Command, member: WorkerProcessHandle) -> Goal | str | None:
        """Begin a command; returns what it waits for, None if it is done."""
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
            case _:  # drain, stop
                self._pool.close(member, at_once=command.verb == "stop")
                return member.name if member.process else None

    def _load(self, command: Command, member: WorkerProcessHandle) -> Goal | None:
        spec = self._catalog.get(command.model)
        if spec is None:
            raise CommandError(f"{command.model!r} is not in the models file of this host")
        devices = self._devices(spec, command, member)
        return self._aim(spec, devices)

    def _devices(self, spec: ModelSpec, command: Command, member: WorkerProcessHandle) -> list[int]:
        """The devices of the command, else the worker's and the ones after it."""
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
        """Cancel earlier commands to release its model."""
        member.sleep_level = 0
        self._settle(
            lambda one: one.target == member.name and one.verb in ("unload", "sleep"),
            "another command came first",
        )

    def _forget_replaced(self) -> None:
        """Fail the commands whose goals were replaced."""
        goals = set(self._pool.goals.values())
        self._settle(
            lambda one: isinstance(one.target, Goal) and one.target not in goals,
            "another command came first",
        )

    def _wake(self, member: WorkerProcessHandle) -> Goal | None:
        if member.spec is None or member.state not in (State.ASLEEP, State.READY):
            raise CommandError(f"it is not asleep, it is {member.state.value}")
        return self._aim(member.spec, [member.device])

    def _unload(self, member: WorkerProcessHandle) -> str | None:
        if member.state in (State.WARM, State.WARMING):
            return None
        if member.state is State.ASLEEP:
            self._pool.give_way(member)
        else:
            self._forget_release(member)
            self._pool.aim(None, member.devices)
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

    def _check(self, entry: str, command: Command) -> None:
        """Report whether this host can load other weights for a model, before it tries."""
        reason = self._why_unfit(command)
        if reason:
            log.warning("%s: check %s: %s", command.worker, command.model, reason)
        self._acknowledge(entry, command.worker, reason)

    def _why_unfit(self, command: Command) -> str:
        """Why a model cannot have the weights of a `check`; "" if it can."""
        spec = self._catalog.get(command.model)
        if spec is None:
            return f"{command.model!r} is not in the models file of this host"
        try:
            check_weights(self._settings, spec, command.weights)
        except Unsupported as error:
            return str(error)
        except OSError as error:
            return f"{command.weights}: {error.strerror or error}"
        except Exception as error:  # noqa: BLE001  # of a hostile file; the sender waits for an answer
            return f"{command.weights}: {type(error).__name__}: {error}"
        return ""

    # Outcomes

    def reached(self, goal: Goal) -> None:
        """A goal is reached."""
        self._settle(lambda one: one.target is goal)

    def missed(self, goal: Goal, reason: str) -> None:
        """The model of a goal cannot be loaded."""
        self._settle(lambda one: one.target is goal, reason)

    def changed(self, member: WorkerProcessHandle) -> None:
        """A process has changed its state."""
        verb = _COMPLETES.get(member.state)
        self._settle(lambda one: one.target == member.name and one.verb == verb)

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """A process cannot sleep; it is being unloaded."""
        self._settle(lambda one: one.target == member.name and one.verb == "sleep", reason)

    def died(self, member: WorkerProcessHandle, reason: str) -> None:
        """A process has ended, which completes some commands and fails the others."""
        self._settle(lambda one: one.target == member.name and one.verb in _ENDS)
        self._settle(lambda one: one.target == member.name, f"the process died: {reason}")

    def _settle(self, is_meant: Callable[[PendingCommand], bool], reason: str = "") -> None:
        settled = [one for one in self._pending if is_meant(one)]
        self._pending = [one for one in self._pending if one not in settled]
        for one in settled:
            self._acknowledge(one.entry, one.worker, reason)


# Reads the control stream: a thread that hands commands and signals to its controller.


class CommandReader(StreamReader):
    """Calls ``put`` with every command and signal of the stream, and its entry id.

    It reads the stream from its start: old commands are for workers that are gone, since names with
    incarnations never repeat, and skipping them could miss a command for a worker that joins before
    the first read. ``put`` gets None after an outage: the server may have lost writes.
    """

    def __init__(
        self,
        yard: Yard,
        put: Callable[[tuple[str, Command | Order] | None], None],
        block_ms: int,
    ) -> None:
        super().__init__(yard.connection, yard.keys.control, block_ms, "control")
        self._put = put
        self._is_cut_off = False

    def run_once(self) -> None:
        """One bounded read."""
        super().run_once()
        if self._is_cut_off:
            self._is_cut_off = False
            self._put(None)

    def _on_outage(self) -> None:
        self._is_cut_off = True

    def _take(self, entry: str, fields: dict[bytes, bytes]) -> None:
        said = parse_order(fields) if b"signal" in fields else parse_command(fields)
        if said is None:
            log.error("entry %s of the control stream is neither a command nor a signal", entry)
        else:
            self._put((entry, said))
