"""Brings the processes of a host to their desired states, and acknowledges signals.

The hash `desired` holds the desired states; signals only announce a change. So it does not matter
which signals a controller has seen.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import redis

from tokenyard.broker.outage import Outage
from tokenyard.protocol.control import (
    ALL,
    DesiredState,
    DesiredStates,
    Order,
    RunState,
    model_scope,
    worker_scope,
)
from tokenyard.protocol.streams import position
from worker.host.allocation import Goal
from worker.host.pool import Pool
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State, is_fit, next_step, why_not
from worker.messages import ReloadWeights

log = logging.getLogger("tokenyard.worker.control")

#: Most unacknowledged signals of one worker.
MOST_UNANSWERED = 100
#: The engine is up and takes commands about its run state.
_CONTROLLABLE = frozenset({State.READY, State.DRAINING})
#: A process leaves these states by itself, soon.
_PASSING = frozenset({State.DRAINED, State.UNLOADING})
_BY_WEIGHTS = frozenset({"RELOAD_WEIGHTS", "UNPAUSE"})


class StateReconciler:
    """Compares desired and observed state of each process and sends it the next step."""

    def __init__(
        self,
        pool: Pool,
        read: Callable[[], DesiredStates],
        acknowledge: Callable[[str, str, str], None],
    ) -> None:
        """``read`` returns the desired states; it raises `redis.RedisError`.

        ``acknowledge(entry, worker, reason)`` reports the outcome of a signal.
        """
        self._pool = pool
        self._read = read
        self._acknowledge = acknowledge
        self._desired: DesiredStates | None = None  # None: unknown yet
        self._since = (0, 0)  # older signals need no acknowledgement
        self._outage = Outage(log, "reading the desired states")
        self._is_stale = True
        self._unanswered: dict[str, deque[tuple[str, Order, bool]]] = {  # True: in its scope
            member.name: deque(maxlen=MOST_UNANSWERED) for member in pool.members
        }

    # Desired state

    def handle(self, entry: str, order: Order) -> None:
        """Handle a signal."""
        if self._desired is None or position(entry) <= self._since:
            return
        log.info("signal %s: %s %s %s", entry, order.signal, order.scope, order.why)
        self.mark_stale()
        for member in self._pool.members:
            scopes = (ALL, model_scope(member.model), worker_scope(member.name))
            self._unanswered[member.name].append((entry, order, order.scope in scopes))

    def mark_stale(self) -> None:
        """The desired states may have changed."""
        self._is_stale = True

    def refresh(self) -> None:
        """Read the desired states if they may have changed."""
        if self._is_stale:
            try:
                self.read()
            except redis.RedisError as error:
                self._outage.note(error)
            else:
                self._outage.over()

    def read(self) -> None:
        """Read the desired states. Raises `redis.RedisError`."""
        desired_states = self._read()
        if self._desired is None:
            self._since = position(desired_states.changed)
        self._desired, self._is_stale = desired_states, False

    def wanted(self, member: WorkerProcessHandle) -> DesiredState:
        """The desired state of a process with its present model."""
        return self._desired_of(member.name, member.model)

    def _desired_of(self, name: str, model: str) -> DesiredState:
        return self._desired.of(name, model) if self._desired else DesiredState()

    def weights(self) -> dict[str, str]:
        """Paths of checkpoints that replace a model's own weights, by model."""
        goals = {goal for goal in self._pool.goals.values() if goal}
        return {goal.spec.name: self.weights_of(goal.spec.name) for goal in goals}

    def weights_of(self, model: str) -> str:
        """The path of the checkpoint that replaces a model's own weights; "" for none."""
        return self._desired_of("", model).weights

    # Reconciliation

    def advance(self, member: WorkerProcessHandle) -> bool:
        """Send a process its next step; returns whether its roster entry has changed."""
        if self._desired is None:
            return False
        wanted, observed = self.wanted(member), member.observed
        observed.reset_refusals(self._desired.changed)
        if member.state in _CONTROLLABLE:
            step = next_step(wanted, observed)
            if step is not None:
                log.info("%s: %s", member.name, step)
                observed.asked = step
                member.send(step)
        observed.run_state = self._run_state(member, wanted)
        self._conclude(member, wanted, self._desired.changed)
        is_news = observed.as_shown != observed.shown
        observed.shown = observed.as_shown
        return is_news

    def may_serve(self, member: WorkerProcessHandle) -> bool:
        """Whether a process may serve its lane."""
        is_there = (
            member.state is State.READY and not member.has_released_lane and not member.is_retiring
        )
        return is_there and self._desired is not None and self._is_fit(member)

    def _is_fit(self, member: WorkerProcessHandle) -> bool:
        return is_fit(self.wanted(member), member.observed)

    def suspended(self) -> frozenset[int]:
        """Devices that must be released, or may not be taken up yet."""
        goals = {goal for goal in self._pool.goals.values() if goal}
        held = [goal.devices for goal in goals if self._is_suspended(goal)]
        return frozenset(device for devices in held for device in devices)

    def _is_suspended(self, goal: Goal) -> bool:
        """Whether its devices are suspended; a running engine is paused first, by its mode."""
        if self._desired is None:
            return True
        here = [one for one in self._pool.members if one.device == goal.devices[0]]
        having = [one for one in here if one.spec is goal.spec]
        holder = next((one for one in having if one.is_awake), None)
        if holder is not None and holder.state in _CONTROLLABLE and holder.observed.paused is None:
            return False
        whose = [holder] if holder else having or here
        return any(
            self._desired_of(one.name, goal.spec.name).run_state == "SUSPENDED" for one in whose
        )

    # Acknowledgement

    def _run_state(self, member: WorkerProcessHandle, wanted: DesiredState) -> RunState:
        """The run state of a process; without an engine it is the desired one."""
        observed = member.observed
        if member.state in _PASSING or (member.state in _CONTROLLABLE and member.served):
            return "PAUSED" if observed.paused else "RUNNING"
        if member.state in _CONTROLLABLE:
            return "RUNNING" if wanted.run_state == "RUNNING" and not observed.paused else "PAUSED"
        if observed.run_state == "SUSPENDED" and self._is_coming_back(member):
            return "SUSPENDED"
        return wanted.run_state

    def _is_coming_back(self, member: WorkerProcessHandle) -> bool:
        """Whether a suspended process is waking, or about to."""
        goal = self._pool.goals[member.device]
        return member.state is State.LOADING or (
            member.state is State.ASLEEP and goal is not None and goal.spec is member.spec
        )

    def _is_in_accord(self, member: WorkerProcessHandle, wanted: DesiredState) -> bool:
        observed = member.observed
        if member.state in _CONTROLLABLE:
            fits = wanted.run_state != "SUSPENDED" and not member.has_released_lane
            return fits and not observed.refused and self._is_fit(member)
        if member.state is State.LOADING:
            is_right = observed.weights == wanted.weights and wanted.run_state != "SUSPENDED"
            return is_right and observed.run_state == wanted.run_state
        return member.state not in _PASSING and observed.run_state == wanted.run_state

    def _conclude(self, member: WorkerProcessHandle, wanted: DesiredState, changed: str) -> None:
        """Acknowledge the signals whose outcome is final."""
        observed = member.observed
        if self._is_in_accord(member, wanted):
            observed.obeyed = changed
        elif not (member.state in _CONTROLLABLE and observed.refused and self._is_fit(member)):
            return
        if not member.worker:
            return
        refusal = why_not(wanted, observed)
        if refusal and observed.complained != changed and position(changed) <= self._since:
            # Its sender waits for an answer, too: the signal came before this controller started.
            observed.complained = changed
            self._acknowledge(changed, member.worker, refusal)
        unanswered = self._unanswered[member.name]
        while unanswered and position(unanswered[0][0]) <= position(changed):
            entry, order, is_meant = unanswered.popleft()
            # Without an answer, a worker that refuses something would seem not to have finished.
            if is_meant or observed.refused:
                reason = refusal if _is_about(order, member) else ""
                if reason:
                    log.warning("%s: %s: %s", member.worker, order.signal, reason)
                self._acknowledge(entry, member.worker, reason)


def _is_about(order: Order, member: WorkerProcessHandle) -> bool:
    """Whether a process refuses what an order is about."""
    refused = member.observed.refused
    return order.signal in _BY_WEIGHTS and any(isinstance(one, ReloadWeights) for one in refused)
