"""The states of a worker process, and its next step towards the desired one: a pure decision.

It is taken again after every change, so no step needs to know the one after it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tokenyard.protocol.control import DesiredState, PauseMode, RunState
from worker.messages import EngineCommand, PauseEngine, ReloadWeights, SetEpoch, UnpauseEngine


class State(enum.Enum):
    """Life of a process."""

    DOWN = "down"  # no process; the next one starts after the pause
    WARMING = "warming"  # does everything that needs no model
    WARM = "warm"  # holds no model
    LOADING = "loading"  # loads or wakes a model
    READY = "ready"  # the engine is up
    DRAINING = "draining"  # finishes its requests
    DRAINED = "drained"  # has finished them
    ASLEEP = "asleep"  # the engine has released the device
    UNLOADING = "unloading"  # unloads the model, or falls asleep
    ATTACHED = "attached"  # lent to the leader of a group
    STOPPED = "stopped"  # ended for good


#: The process takes up its device.
AWAKE: Final = frozenset(
    {
        State.LOADING,
        State.READY,
        State.DRAINING,
        State.DRAINED,
        State.UNLOADING,
        State.ATTACHED,
    }
)
#: The process may be silent in these states for a bounded time only.
CHANGING: Final = frozenset({State.WARMING, State.LOADING, State.UNLOADING})
SERVING: Final = frozenset({State.READY, State.DRAINING})


@dataclass(slots=True)
class ObservedState:
    """The state of a process with an engine, as far as it has reported it."""

    paused: PauseMode | None = None  # None: running
    epoch: int | None = None
    weights: str = ""
    asked: EngineCommand | None = None  # the command that it has not answered yet
    refused: dict[EngineCommand, str] = field(default_factory=dict)  # refused commands, and why
    judged: str = ""  # id of the signal since which they are refused
    run_state: RunState = "RUNNING"  # as the roster shows it
    obeyed: str = ""  # id of the newest signal that it has carried out
    complained: str = ""  # the signal whose refusal was reported
    shown: tuple[object, ...] = ()  # the roster's copy

    @property
    def as_shown(self) -> tuple[object, ...]:
        """The part that the roster shows."""
        return self.run_state, self.obeyed, self.epoch, self.weights

    def without_engine(self) -> ObservedState:
        """What is left without the engine: a paused worker stays paused in the roster."""
        return ObservedState(run_state=self.run_state, obeyed=self.obeyed)

    def did(self, errand: EngineCommand) -> None:
        """It reports a command as done; one that was replaced meanwhile does not count."""
        if self.asked != errand:
            return
        self.asked = None
        match errand:
            case PauseEngine(mode):
                self.paused = mode
            case UnpauseEngine():
                self.paused = None
            case SetEpoch(epoch):
                self.epoch = epoch
            case ReloadWeights(path):
                self.weights = path

    def cannot(self, errand: EngineCommand, reason: str) -> None:
        """It refuses a command."""
        if self.asked == errand:
            self.asked = None
            self.refused[errand] = reason

    def reset_refusals(self, changed: str) -> None:
        """Ask again, after a new signal, for what it refused."""
        if self.judged != changed:
            self.judged = changed
            self.refused.clear()


def next_step(wanted: DesiredState, observed: ObservedState) -> EngineCommand | None:
    """The command for a process whose engine is up; None if it must answer first or is done.

    A process that cannot load its desired weights stays paused until others are desired: no
    request is answered with the wrong weights.
    """
    if isinstance(observed.asked, PauseEngine):  # may take as long as the longest request
        return _instead(observed.asked, _rest(wanted, observed))
    if observed.asked is not None:
        return None
    steps = _differences(wanted, observed)
    return next((step for step in steps if step not in observed.refused), None)


def is_fit(wanted: DesiredState, observed: ObservedState) -> bool:
    """Whether a process whose engine is up has reached its desired state and may serve."""
    return observed.asked is None and next_step(wanted, observed) is None


def why_not(wanted: DesiredState, observed: ObservedState) -> str:
    """Why a process cannot reach its desired state; "" if it can."""
    steps = (ReloadWeights(wanted.weights), SetEpoch(wanted.epoch))
    return "; ".join(reason for step, reason in observed.refused.items() if step in steps)


def _rest(wanted: DesiredState, observed: ObservedState) -> PauseMode | None:
    """How it must be paused; None if it must run."""
    if wanted.run_state != "RUNNING":
        return wanted.mode
    return "abort" if observed.weights != wanted.weights else None


def _instead(asked: PauseEngine, rest: PauseMode | None) -> EngineCommand | None:
    if rest is None:
        return UnpauseEngine()
    return PauseEngine(rest) if rest != asked.mode else None


def _differences(wanted: DesiredState, observed: ObservedState) -> Iterator[EngineCommand]:
    """The changes to make, in order: results must carry the right epoch and weights."""
    rest = _rest(wanted, observed)
    if rest is not None and observed.paused != rest:
        yield PauseEngine(rest)
    if observed.weights != wanted.weights:
        yield ReloadWeights(wanted.weights)
    if observed.epoch != wanted.epoch:
        yield SetEpoch(wanted.epoch)
    if rest is None and observed.paused is not None:
        yield UnpauseEngine()
