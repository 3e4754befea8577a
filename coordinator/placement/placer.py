"""Carries the placement out: looks at the yard, decides, commands, and remembers what it said."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Final, Protocol

from coordinator.counts import CoordinatorCounts
from coordinator.dispatch.demand import Demand
from coordinator.dispatch.dispatcher import LostLeadership
from coordinator.placement.decide import PendingLoad, Placement, Situation, place
from coordinator.placement.devices import SERVING, Worker
from coordinator.roster import Roster, RosterMember
from coordinator.routing.schedule import ScheduleWriter
from tokenyard.protocol.commands import Command
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.placer")

#: Pause between two decisions where nothing has happened that cannot wait.
PAUSE_S: Final = 0.05
#: Nor is there one for so many times what the last one took: that grows with the workers.
REST: Final = 49


class DemandSource(Protocol):
    """What knows the requests that wait: the dispatcher."""

    def demands(self) -> list[Demand]:
        """What waits for each model."""

    def fail_model(self, token: str, model: str, reason: str) -> None:
        """Answer all requests that wait for a model that cannot be had."""


class Placer:
    """Has models loaded where requests wait for them.

    What it remembers is a convenience. A successor sees in the roster which models come and go,
    and at worst gives a command twice, which changes nothing, or has a model loaded once more
    than needed.
    """

    def __init__(
        self,
        scripts: Scripts,
        roster: Roster,
        queue: DemandSource,
        settings: CoordinatorSettings,
        record: ScheduleWriter | None = None,
        counts: CoordinatorCounts | None = None,
    ) -> None:
        self._counts = counts or CoordinatorCounts()
        self._scripts = scripts
        self._roster = roster
        self._queue = queue
        self._settings = settings
        self._record = record
        #: For how long the next turn may be waited for: what waits may have to be placed by then.
        self.patience_s = math.inf
        self._token = ""  # of the term in which the orders were given
        self._orders: Sequence[PendingLoad] = ()
        self._due = 0.0  # monotonic
        self._members: dict[str, RosterMember] | None = None  # the roster as it was decided by
        self._served: set[str] = set()  # models that somebody serves there, or is about to
        self._cold: set[str] = set()  # models that requests waited for and nobody held then

    def run_once(self, token: str) -> None:
        """Decide, if there may be something new to decide, and command.

        Raises `LostLeadership` where the yard has another leader. Where no host says what it may
        load there is nothing to place.
        """
        self.patience_s = math.inf
        if self._settings.static or not self._roster.hosts:
            return
        self._begin_term(token)
        demands = [one for one in self._queue.demands() if self._is_running(one.model)]
        if demands:
            self.patience_s = PAUSE_S
        if self._is_due(demands):
            began = time.monotonic()
            placement = place(self._situation(demands))
            now = time.monotonic()
            self._due = now + max(PAUSE_S, REST * (now - began))
            self._carry_out(token, placement)

    def _is_running(self, model: str) -> bool:
        """Whether operators have not told the model to pause, or all."""
        return self._roster.desired_states.is_running("", model)

    def _begin_term(self, token: str) -> None:
        """Another may have led meanwhile, and commanded otherwise."""
        if token != self._token:
            self._token, self._orders = token, ()

    def _is_due(self, demands: Sequence[Demand]) -> bool:
        """Whether the pause is over, the roster was read anew, or a new model is asked for."""
        members = self._roster.members
        is_new = self._members is not members
        if is_new:
            self._members = members
            self._served = {m.info.model for m in members.values() if m.info.state in SERVING}
        before, self._cold = self._cold, {one.model for one in demands} - self._served
        return bool(is_new or self._cold - before or time.monotonic() >= self._due)

    def _situation(self, demands: Sequence[Demand]) -> Situation:
        members, now_ms = self._roster.members.items(), self._roster.server_ms()
        offered = (model.name for host in self._roster.hosts.values() for model in host.models)
        return Situation(
            demands=demands,
            workers=[
                Worker(one, m.info, m.load, now_ms if m.load else m.worked_ms, m.run_state)
                for one, m in members
                if m.has_lease
            ],
            paused={model for model in offered if not self._is_running(model)},
            hosts=self._roster.hosts,
            now_ms=now_ms,
            max_model_wait_s=self._settings.max_model_wait_s,
            max_swap_share=self._settings.max_swap_share,
            orders=self._orders,
        )

    def _carry_out(self, token: str, placement: Placement) -> None:
        for command in placement.commands:
            self._command(token, command)
        self._orders = placement.orders
        for model, reason in placement.hopeless.items():
            log.warning("no worker for %s: %s", model, reason)
            self._queue.fail_model(token, model, reason)

    def _command(self, token: str, command: Command) -> None:
        if self._scripts.command(command, token) is None:
            raise LostLeadership
        self._counts.swaps += 1
        log.info("%s is to load %s: %s", command.worker, command.model, command.why)
        if self._record:
            name = self._roster.members[command.worker].info.name
            self._record.write_placing(command, name)
