"""The signals that an operator may give on the board. None waits until it is obeyed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from tokenyard.admin.scopes import known_models, known_workers, other_pauses, scopes_of
from tokenyard.admin.signals import Signals
from tokenyard.admin.snapshot import RosterView, read_roster
from tokenyard.board.action import Action, ActionRefused, Input, Outcome, Preview
from tokenyard.board.yard import Parameters
from tokenyard.protocol.control import (
    ALL,
    PAUSE_MODES,
    DesiredState,
    DesiredStates,
    Invalid,
    Order,
    PauseMode,
    Signal,
    after,
    model_scope,
    said,
    worker_scope,
)
from tokenyard.protocol.texts import counted, printable
from tokenyard.protocol.yard import Yard

_MOST_NAMED: Final = 10
_ENDS: Final = frozenset({"DRAIN", "STOP"})
#: What each does, after "<scope>, <n> workers: ".
_EFFECTS: Final[Mapping[Signal, str]] = {
    "PAUSE": "they take no new requests, which wait in the queue. Who joins later is paused too.",
    "UNPAUSE": "they run again, unless another scope holds them.",
    "SUSPEND": "their engines sleep and free their devices; kept requests return to the queue.",
    "RESUME": "their engines wake; they stay paused until they are unpaused.",
    "DRAIN": "their processes end for good when their requests have finished.",
    "STOP": "their processes end for good at once; their requests return to the queue.",
}
_MODES: Final = Input(
    "mode",
    "Running requests",
    value="abort",
    choices=PAUSE_MODES,
    hint="abort: they return to the queue at once. wait: they finish. keep: they stay in place.",
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A signal that is asked for, and the yard at that moment."""

    order: Order
    roster: RosterView
    desired: DesiredStates

    @property
    def workers(self) -> Sequence[str]:
        """The workers in its scope now, with their incarnation."""
        live = self.roster.live.items()
        return [one for one, info in sorted(live) if self.order.scope in scopes_of(info)]


def _asked(signal: Signal, yard: Yard, given: Parameters) -> _Asked:
    """Raises `ActionRefused` for a scope that the yard does not know."""
    signals = Signals(yard)
    roster, desired = read_roster(yard), signals.desired_states()
    scope = given.text("scope")
    known = {ALL}
    known |= {model_scope(name) for name in known_models(roster, desired.by_scope)}
    known |= {worker_scope(name) for name in known_workers(roster, desired.by_scope)}
    if scope not in known:
        raise ActionRefused(f"The yard knows no {printable(said(scope)[:200])}.")
    mode: PauseMode = given.one_of("mode", PAUSE_MODES, "abort")  # type: ignore[assignment]
    order = Order(
        signal=signal,
        scope=scope,
        mode=mode if signal == "PAUSE" else "abort",
        why=given.why,
        by=given.actor.operator,
    )
    return _Asked(order, roster, desired)


def _preview(signal: Signal, yard: Yard, given: Parameters) -> Preview:
    asked = _asked(signal, yard, given)
    workers, name = asked.workers, said(asked.order.scope)
    named = list(workers[:_MOST_NAMED])
    if len(workers) > _MOST_NAMED:
        named.append(f"and {len(workers) - _MOST_NAMED} more")
    text = f"{signal} of {name}, {counted(len(workers), 'worker')}: {_EFFECTS[signal]}"
    if signal in _ENDS:
        nobody = f"{name}: no worker is live." if not workers else ""
        return Preview(nobody or text, items=named, count=len(workers))
    state = asked.desired.by_scope.get(asked.order.scope, DesiredState())
    try:
        is_redundant = after(state, asked.order) == state
    except Invalid as error:
        raise ActionRefused(f"{error}.") from error
    if is_redundant:
        behind = Signals(yard).behind(asked.roster.live, asked.desired.changed)
        left = [one.worker for one in behind if one.worker in workers]
        text = f"{name} is {state.run_state} already."
        if left:
            text += " Those that refuse try again."
        return Preview(text, items=left[:_MOST_NAMED], count=len(left))
    if signal == "UNPAUSE":
        others = other_pauses(asked.roster.workers, asked.desired, asked.order.scope)
        text += "".join(f" Still {one.run_state}: {said(one.scope)}." for one in others[:3])
    inputs = [_MODES] if signal == "PAUSE" else []
    # Also without a worker: it is for those who join later.
    return Preview(text, inputs=inputs, items=named, count=max(1, len(workers)))


def _run(signal: Signal, yard: Yard, given: Parameters) -> Outcome:
    asked = _asked(signal, yard, given)
    order, name = asked.order, said(asked.order.scope)
    try:
        receipt = Signals(yard).give(order)
    except Invalid as error:
        raise ActionRefused(f"{error}.") from error
    count = len(receipt.workers) if signal in _ENDS else len(asked.workers)
    if signal in _ENDS and not count:
        text = f"{name}: no worker is live."
    elif receipt.is_redundant:
        text = f"{name}: nothing was to change."
    else:
        text = f"{signal} is given to {name}, {counted(count, 'worker')} now."
    details = {"signal": signal, "scope": order.scope, "workers": str(count)}
    details |= {"mode": order.mode} if signal == "PAUSE" else {}
    return Outcome(text, target=name, details=details)


def _action(signal: Signal, title: str, *, is_dangerous: bool = False) -> Action:
    return Action(
        name=f"signal.{signal.lower()}",
        title=title,
        role="operator",
        preview=partial(_preview, signal),
        run=partial(_run, signal),
        is_dangerous=is_dangerous,
    )


ACTIONS: Final[tuple[Action, ...]] = (
    _action("PAUSE", "Pause"),
    _action("UNPAUSE", "Unpause"),
    _action("SUSPEND", "Suspend", is_dangerous=True),
    _action("RESUME", "Resume"),
    _action("DRAIN", "Drain", is_dangerous=True),
    _action("STOP", "Stop", is_dangerous=True),
)
