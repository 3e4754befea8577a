"""Carries out the placement of models: decides, sends commands, and remembers pending loads."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from coordinator.dispatch.dispatcher import Dispatcher
from coordinator.placement.decide import PendingLoad, Placement, Situation, place
from coordinator.placement.devices import SERVING, Worker
from coordinator.placement.needs import Demand
from coordinator.roster import Roster, RosterMember
from coordinator.routing.selection import ScheduleWriter
from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.scripts import Scripts

log = logging.getLogger("tokenyard.coordinator.placer")

#: Pause between two decisions unless something urgent happens.
PAUSE_S: Final = 0.05
#: The pause is also so many times as long as the last decision took, which grows with the workers.
REST: Final = 49


class Placer:
    """Has models loaded where requests wait for them.

    Its memory is dispensable: a successor sees in the roster which models come and go, and at worst
    sends a command twice, which has no effect, or loads a model once more than needed.
    """

    def __init__(
        self,
        scripts: Scripts,
        roster: Roster,
        dispatcher: Dispatcher,
        settings: CoordinatorSettings,
        counts: CoordinatorCounts,
        record: ScheduleWriter | None = None,
    ) -> None:
        self._counts = counts
        self._scripts = scripts
        self._roster = roster
        self._dispatcher = dispatcher
        self._settings = settings
        self._record = record
        #: How long the coordinator may wait before the next turn.
        self.patience_s = math.inf
        self._token = ""  # of the term in which the commands were sent
        self._pending: Sequence[PendingLoad] = ()
        self._due = 0.0  # monotonic
        self._members: dict[str, RosterMember] | None = None  # of the last decision
        self._served: set[str] = set()  # models that a worker of these serves or is about to
        self._cold: set[str] = set()  # models with requests and without a worker then

    def run_once(self, token: str) -> None:
        """Decide, if there may be something new to decide, and send the commands.

        Without a host that may load models there is nothing to place.
        """
        self.patience_s = math.inf
        if self._settings.static or not self._roster.hosts:
            return
        if token != self._token:  # another may have led meanwhile, and sent other commands
            self._token, self._pending = token, ()
        demands = [one for one in self._dispatcher.demands() if self._is_running(one.model)]
        if demands:
            self.patience_s = PAUSE_S
        if self._is_due(demands):
            began = clock.monotonic()
            placement = place(self._situation(demands))
            now = clock.monotonic()
            self._due = now + max(PAUSE_S, REST * (now - began))
            self._carry_out(token, placement)

    def _is_running(self, model: str) -> bool:
        """Whether operators have paused neither the model nor everything."""
        return self._roster.desired_states.is_running("", model)

    def _is_due(self, demands: Sequence[Demand]) -> bool:
        """Whether the pause is over, the roster was read again, or a new model has requests."""
        members = self._roster.members
        is_new = self._members is not members
        if is_new:
            self._members = members
            self._served = {m.info.model for m in members.values() if m.info.state in SERVING}
        before, self._cold = self._cold, {one.model for one in demands} - self._served
        return bool(is_new or self._cold - before or clock.monotonic() >= self._due)

    def _situation(self, demands: Sequence[Demand]) -> Situation:
        members, now_ms = self._roster.members.items(), self._roster.broker_time.now_ms
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
            gone=self._roster.gone,
            now_ms=now_ms,
            max_model_wait_s=self._settings.max_model_wait_s,
            max_swap_share=self._settings.max_swap_share,
            pending=self._pending,
        )

    def _carry_out(self, token: str, placement: Placement) -> None:
        for command in placement.commands:
            self._scripts.command(command, token)
            self._counts.swaps += 1
            log.info("%s is to load %s: %s", command.worker, command.model, command.why)
            if self._record:
                name = self._roster.members[command.worker].info.name
                self._record.write_placing(command, name)
        self._pending = placement.pending
        for model, reason in placement.hopeless.items():
            log.warning("no worker for %s: %s", model, reason)
            self._dispatcher.fail_model(token, model, reason)
