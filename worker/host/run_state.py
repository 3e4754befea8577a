"""What a worker process should be told next to come to what operators want of it: a pure decision.

It is asked again whenever something has changed, so no step needs to know of the one after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenyard.protocol.control import DesiredState, PauseMode, RunState
from worker.messages import (
    EngineCommand,
    PauseEngine,
    Profile,
    ReloadWeights,
    SetEpoch,
    UnpauseEngine,
)

Ask = PauseEngine | EngineCommand


@dataclass(slots=True)
class ObservedState:
    """What a process with an engine does of what operators want, as far as it has said so."""

    paused: PauseMode | None = None  # None: it runs
    epoch: int | None = None
    profiling: bool = False
    weights: str = ""
    asked: Ask | None = None  # what it has been told and has not answered yet
    refused: dict[EngineCommand, str] = field(default_factory=dict)  # what it cannot do, and why
    judged: str = ""  # id of the signal since which it has refused that
    run_state: RunState = "RUNNING"  # that the yard is shown
    obeyed: str = ""  # id of the newest signal that it is in accord with
    complained: str = ""  # the signal of which was said that it cannot be obeyed
    shown: tuple[object, ...] = ()  # what the yard has been told of all this

    @property
    def as_shown(self) -> tuple[object, ...]:
        """What the yard is told."""
        return self.run_state, self.obeyed, self.epoch, self.profiling, self.weights

    def rests(self, mode: PauseMode) -> None:
        """It has said that nothing runs."""
        if self.asked == PauseEngine(mode):
            self.asked, self.paused = None, mode

    def has_done(self, errand: EngineCommand) -> bool:
        """It has said that it has done something; whether it was asked for that here."""
        if self.asked != errand:
            return False
        self.asked = None
        match errand:
            case UnpauseEngine():
                self.paused = None
            case SetEpoch(epoch):
                self.epoch = epoch
            case Profile(start):
                self.profiling = start
            case ReloadWeights(path):
                self.weights = path
        return True

    def cannot(self, errand: EngineCommand, reason: str) -> bool:
        """It has said that it cannot do something; whether it was asked for that here."""
        if self.asked != errand:
            return False
        self.asked = None
        self.refused[errand] = reason
        return True

    def reset_refusals(self, changed: str) -> None:
        """With each signal it is asked again for what it could not do."""
        if self.judged != changed:
            self.judged = changed
            self.refused.clear()


def next_step(wanted: DesiredState, observed: ObservedState) -> Ask | None:
    """What to tell a process whose engine is up; None where it has to answer first, or is there.

    One that cannot have the weights that it should have rests until they are others: no request
    is answered by a model that nobody meant.
    """
    if isinstance(observed.asked, PauseEngine):  # may take as long as the longest request
        return _instead(observed.asked, _rest(wanted, observed))
    if observed.asked is not None:
        return None
    steps = _differences(wanted, observed)
    return next((step for step in steps if step not in observed.refused), None)


def is_fit(wanted: DesiredState, observed: ObservedState) -> bool:
    """Whether a process whose engine is up may have a lane: it would do nothing unwanted there."""
    return observed.asked is None and next_step(wanted, observed) is None


def why_not(wanted: DesiredState, observed: ObservedState) -> str:
    """Why a process does not do all that is wanted; "" where nothing hinders it."""
    reasons = [reason for errand, reason in observed.refused.items() if _is_wanted(errand, wanted)]
    return "; ".join(reasons)


def _is_wanted(errand: EngineCommand, wanted: DesiredState) -> bool:
    return errand in (
        ReloadWeights(wanted.weights),
        Profile(wanted.profiling),
        SetEpoch(wanted.epoch),
    )


def _rest(wanted: DesiredState, observed: ObservedState) -> PauseMode | None:
    """How it has to rest now; None where it has to run."""
    if wanted.run_state != "RUNNING":
        return wanted.mode
    return "abort" if observed.weights != wanted.weights else None


def _instead(asked: PauseEngine, rest: PauseMode | None) -> Ask | None:
    if rest is None:
        return UnpauseEngine()
    return PauseEngine(rest) if rest != asked.mode else None


def _differences(wanted: DesiredState, observed: ObservedState) -> Iterator[Ask]:
    """All that has to change, in this order: results must tell their epoch and weights truly."""
    rest = _rest(wanted, observed)
    if rest is not None and observed.paused != rest:
        yield PauseEngine(rest)
    if observed.weights != wanted.weights:
        yield ReloadWeights(wanted.weights)
    if observed.epoch != wanted.epoch:
        yield SetEpoch(wanted.epoch)
    if observed.profiling != wanted.profiling:
        yield Profile(wanted.profiling)
    if rest is None and observed.paused is not None:
        yield UnpauseEngine()
