"""Brings the processes of a host to what operators want of them, and says who is in accord.

What is wanted stands in the hash `desired_state`; signals only say that it has changed. So it does
not matter which of them a controller has seen.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import redis

from tokenyard.broker.outage import Outage
from tokenyard.protocol.commands import Acknowledgement
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
from worker.host.process_state import State
from worker.host.run_state import is_fit, next_step, why_not
from worker.messages import Profile, ReloadWeights

log = logging.getLogger("tokenyard.worker.control")

#: Most signals of which one worker has yet to say what came of them.
MOST_UNANSWERED = 100
#: The engine is up, and takes what it is told about its run state.
_LED = frozenset({State.READY, State.DRAINING})
#: What takes up a device leaves these states by itself, soon.
_PASSING = frozenset({State.DRAINED, State.UNLOADING})
_BY_PROFILING = frozenset({"START_PROFILE", "STOP_PROFILE"})
_BY_WEIGHTS = frozenset({"RELOAD_WEIGHTS", "UNPAUSE"})


class StateReconciler:
    """Compares what is wanted with what each process does, and tells it the next step."""

    def __init__(
        self,
        pool: Pool,
        read: Callable[[], DesiredStates],
        acknowledge: Callable[[str, Acknowledgement], None],
    ) -> None:
        """``read`` gives what is wanted now; it raises `redis.RedisError`."""
        self._pool = pool
        self._read = read
        self._acknowledge = acknowledge
        self._postures: DesiredStates | None = None  # None: not known yet
        self._since = (0, 0)  # what was wanted at first; older signals need no answer
        self._outage = Outage(log, "reading what operators want")
        self._is_stale = True
        self._unanswered: dict[str, deque[tuple[str, Order]]] = {
            member.name: deque(maxlen=MOST_UNANSWERED) for member in pool.members
        }

    # What is wanted

    def heed(self, entry: str, order: Order) -> None:
        """A signal has been given."""
        if self._postures is None or position(entry) <= self._since:
            return
        log.info("signal %s: %s %s %s", entry, order.signal, order.scope, order.why)
        self.mark_stale()
        for member in self._pool.members:
            model = member.spec.name if member.spec else ""
            if order.scope in (ALL, model_scope(model), worker_scope(member.name)):
                self._unanswered[member.name].append((entry, order))

    def mark_stale(self) -> None:
        """What is wanted may have changed."""
        self._is_stale = True

    def look(self) -> None:
        """Read again what is wanted, where it may have changed."""
        if self._is_stale:
            try:
                self.read()
            except redis.RedisError as error:
                self._outage.note(error)
            else:
                self._outage.over()

    def read(self) -> None:
        """Read what is wanted. Raises `redis.RedisError`."""
        desired_states = self._read()
        if self._postures is None:
            self._since = position(desired_states.changed)
        self._postures, self._is_stale = desired_states, False

    def wanted(self, member: WorkerProcessHandle) -> DesiredState:
        """What is wanted of a process with the model that it has."""
        return self._posture_of(member.name, member.spec.name if member.spec else "")

    def _posture_of(self, name: str, model: str) -> DesiredState:
        return self._postures.of(name, model) if self._postures else DesiredState()

    def weights(self) -> dict[str, str]:
        """By model: the path of a checkpoint that stands in for its own."""
        goals = {goal for goal in self._pool.goals.values() if goal}
        return {goal.spec.name: self.weights_of(goal.spec.name) for goal in goals}

    def weights_of(self, model: str) -> str:
        """The path of a checkpoint that stands in for a model's own; "" for none."""
        return self._posture_of("", model).weights

    # What is done about it

    def lead(self, member: WorkerProcessHandle) -> bool:
        """Tell a process its next step, and note what it does; whether the yard must be told."""
        if self._postures is None:
            return False
        wanted, observed = self.wanted(member), member.observed
        observed.judge_anew(self._postures.changed)
        if member.state in _LED:
            step = next_step(wanted, observed)
            if step is not None:
                log.info("%s: %s", member.name, step)
                observed.asked = step
                member.send(step)
        observed.run_state = self._run_state(member, wanted)
        self._conclude(member, wanted)
        is_news = observed.as_shown != observed.shown
        observed.shown = observed.as_shown
        return is_news

    def may_serve(self, member: WorkerProcessHandle) -> bool:
        """Whether a process may have its lane: nothing unwanted would happen there."""
        is_there = (
            member.state is State.READY and not member.has_released_lane and not member.is_retiring
        )
        return is_there and self._postures is not None and self._is_fit(member)

    def _is_fit(self, member: WorkerProcessHandle) -> bool:
        return is_fit(self.wanted(member), member.observed)

    def suspended(self) -> frozenset[int]:
        """Devices that are to be let go of, or that may not be taken up yet."""
        goals = {goal for goal in self._pool.goals.values() if goal}
        held = [goal.devices for goal in goals if self._is_suspended(goal)]
        return frozenset(device for devices in held for device in devices)

    def _is_suspended(self, goal: Goal) -> bool:
        """It is paused first, so that what runs there ends as the pause says."""
        if self._postures is None:
            return True
        here = [one for one in self._pool.members if one.device == goal.devices[0]]
        having = [one for one in here if one.spec is goal.spec]
        holder = next((one for one in having if one.is_awake), None)
        if holder is not None and holder.state in _LED and holder.observed.paused is None:
            return False
        whose = [holder] if holder else having or here
        return any(
            self._posture_of(one.name, goal.spec.name).run_state == "SUSPENDED" for one in whose
        )

    # What came of it

    def _run_state(self, member: WorkerProcessHandle, wanted: DesiredState) -> RunState:
        """What a process does; one without an engine does what is wanted."""
        observed = member.observed
        if member.state in _PASSING or (member.state in _LED and member.served):
            return "PAUSED" if observed.paused else "RUNNING"
        if member.state in _LED:
            return "RUNNING" if wanted.run_state == "RUNNING" and not observed.paused else "PAUSED"
        if observed.run_state == "SUSPENDED" and self._is_coming_back(member):
            return "SUSPENDED"
        return wanted.run_state

    def _is_coming_back(self, member: WorkerProcessHandle) -> bool:
        """Whether a process that was suspended is waking, or is about to."""
        goal = self._pool.goals[member.device]
        return member.state is State.LOADING or (
            member.state is State.ASLEEP and goal is not None and goal.spec is member.spec
        )

    def _is_in_accord(self, member: WorkerProcessHandle, wanted: DesiredState) -> bool:
        observed = member.observed
        if member.state in _LED:
            fits = wanted.run_state != "SUSPENDED" and not member.has_released_lane
            return fits and not observed.refused and self._is_fit(member)
        if member.state is State.LOADING:
            is_right = observed.weights == wanted.weights and wanted.run_state != "SUSPENDED"
            return is_right and observed.run_state == wanted.run_state
        return member.state not in _PASSING and observed.run_state == wanted.run_state

    def _conclude(self, member: WorkerProcessHandle, wanted: DesiredState) -> None:
        """Say what came of the signals, where nothing more will come of them."""
        if self._postures is None:
            return
        observed, changed = member.observed, self._postures.changed
        if self._is_in_accord(member, wanted):
            observed.obeyed = changed
        elif not (member.state in _LED and observed.refused and self._is_fit(member)):
            return
        if not member.worker:
            return
        if observed.refused:
            self._complain(member, wanted, changed)
        unanswered = self._unanswered[member.name]
        while unanswered and position(unanswered[0][0]) <= position(changed):
            self._answer(member, wanted, *unanswered.popleft())

    def _complain(self, member: WorkerProcessHandle, wanted: DesiredState, changed: str) -> None:
        """Also those may wait for it who gave the signal before this controller was there."""
        if member.observed.complained != changed and position(changed) <= self._since:
            member.observed.complained = changed
            reason = why_not(wanted, member.observed)
            self._acknowledge(
                changed, Acknowledgement(worker=member.worker, done=False, reason=reason)
            )

    def _answer(
        self, member: WorkerProcessHandle, wanted: DesiredState, entry: str, order: Order
    ) -> None:
        reason = why_not(wanted, member.observed) if _is_about(order, member) else ""
        if reason:
            log.warning("%s: %s: %s", member.worker, order.signal, reason)
        done = Acknowledgement(worker=member.worker, done=not reason, reason=reason)
        self._acknowledge(entry, done)


def _is_about(order: Order, member: WorkerProcessHandle) -> bool:
    """Whether what a process cannot do is what an order is about."""
    refused = member.observed.refused
    return (order.signal in _BY_PROFILING and any(isinstance(one, Profile) for one in refused)) or (
        order.signal in _BY_WEIGHTS and any(isinstance(one, ReloadWeights) for one in refused)
    )
