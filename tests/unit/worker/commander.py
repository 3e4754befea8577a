"""Commands from a yard to a pool with played processes."""

from __future__ import annotations

from typing import Any

from tests.support.pools import MEMORY, PAIR, A, B, Theatre, engine_info
from tokenyard.protocol.control import Acknowledgement, Command, Verb
from tokenyard.scripts.answers import Why
from worker.host.allocation import Goal, fits
from worker.host.commands import CommandHandler
from worker.host.diagnosis import FailedStart
from worker.host.process_handle import WorkerProcessHandle
from worker.messages import Ready, ToController, ToProcess
from worker.models import ModelSpec


class Commander:
    """Gives commands, and owns the pool like a controller."""

    def __init__(self, played: Theatre) -> None:
        self.played = played
        self.acks: dict[str, Acknowledgement] = {}
        catalog = {spec.name: spec for spec in (A, B, PAIR)}
        self.orders = CommandHandler(played.settings, played.pool, catalog, self._acknowledge)
        self._given = 0
        played.warm_up()
        played.pool._listener = self
        for member in played.pool.members:
            member.worker = f"{member.name}.1"

    def _acknowledge(self, entry: str, worker: str, reason: str) -> None:
        assert entry not in self.acks, "each is acknowledged once"
        self.acks[entry] = Acknowledgement(worker=worker, done=not reason, reason=reason)

    def command(self, verb: Verb, name: str = "w-0", **fields: Any) -> str:
        """Give a command and let the pool act on it; return its entry."""
        self._given += 1
        entry = f"{self._given}-0"
        self.orders.run(entry, Command(verb=verb, worker=f"{name}.1", **fields))
        self.played.turn()
        return entry

    def done(self, entry: str) -> bool:
        """Whether a command has succeeded."""
        return entry in self.acks and self.acks[entry].done

    def reason(self, entry: str) -> str:
        """Why a command failed."""
        assert not self.acks[entry].done
        return self.acks[entry].reason

    def load(self, spec: ModelSpec, name: str = "w-0") -> None:
        """Load a model on a worker."""
        entry = self.command("load", name, model=spec.name)
        self.say(name, Ready(engine_info(spec), MEMORY))
        assert self.done(entry)
        for member in self.played.pool.members:
            self.told(member.name)

    def say(self, name: str, *messages: ToController) -> None:
        """Make a process report events; the pool acts on each before the next."""
        for message in messages:
            self.played.say(name, message)

    def told(self, name: str) -> list[ToProcess]:
        """The orders that a process has got since the last call."""
        return self.played.heard(name)

    # worker.host.pool.Owner, as in `worker.host.controller.Controller`

    def changed(self, member: WorkerProcessHandle) -> None:
        self.orders.changed(member)

    def serves(self, member: WorkerProcessHandle) -> None:
        self.changed(member)
        goal = self.played.pool.goals[member.device]
        if goal and fits(member, goal):
            self.orders.reached(goal)

    def gives_way(self, member: WorkerProcessHandle) -> None: ...

    def died(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        self.orders.died(member, reason)

    def start_failed(self, member: WorkerProcessHandle, death: FailedStart) -> None: ...

    def failed(self, goal: Goal, reason: str, *, is_lost: bool = False) -> bool:
        self.orders.missed(goal, reason)
        return False

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        self.orders.refused(member, reason)

    def heard(self, member: WorkerProcessHandle, message: ToController) -> None: ...
