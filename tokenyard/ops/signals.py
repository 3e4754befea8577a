"""The control signals of operators: pause, unpause, suspend, resume, epoch, drain, stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from tokenyard.ops.control import Signals
from tokenyard.ops.names import find_scope
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.protocol.control import (
    ALL,
    DesiredState,
    Invalid,
    Order,
    PauseMode,
    Signal,
    after,
    said,
)
from tokenyard.protocol.errors import Refused
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import counted
from tokenyard.yard.pauses import other_pauses, workers_in
from tokenyard.yard.snapshot import RosterView, read_roster

_MOST_NAMED: Final = 10
_ENDS: Final = frozenset({"DRAIN", "STOP"})
#: What each does, after "<scope>, <n> workers: ".
_EFFECTS: Final[Mapping[Signal, str]] = {
    "PAUSE": "they take no new requests, which wait in the queue. Who joins later is paused too.",
    "UNPAUSE": "they run again, unless another scope holds them.",
    "SUSPEND": "their engines sleep and free their devices; kept requests return to the queue.",
    "RESUME": "their engines wake; they stay paused until they are unpaused.",
    "SET_GENERATION_EPOCH": "later results have this epoch in their provenance.",
    "DRAIN": "their processes end for good when their requests have finished.",
    "STOP": "their processes end for good at once; their requests return to the queue.",
}
#: The command to run first where a signal is not allowed.
_FIRST: Final[Mapping[Signal, str]] = {"UNPAUSE": "resume", "SUSPEND": "pause"}

Scope = Annotated[str, Field(noun="scope")]
Mode = Annotated[
    PauseMode,
    Field(
        "Running requests",
        "abort: they return to the queue at once. wait: they finish. keep: they stay in place.",
    ),
]
Epoch = Annotated[int, Field("Epoch", "A whole number; a loop of training increases it.")]


def _asked(
    yard: Yard, caller: Caller, signal: Signal, scope: str, **more: Any
) -> tuple[Order, RosterView]:
    """The signal, and the yard at that moment.

    Raises `Refused` for a scope that the yard does not know.
    """
    roster = read_roster(yard)
    found = find_scope(roster, scope)
    return Order(signal=signal, scope=found, why=caller.why, by=caller.operator, **more), roster


def _refused(error: Invalid, order: Order) -> Refused:
    kind, _, name = order.scope.partition(":")
    first = _FIRST.get(order.signal)
    where = f" --{kind} {name}" if name else ""
    return Refused(f"{error} (tokenyard {first}{where})" if first else str(error))


def _preview_of(signal: Signal) -> Callable[..., Preview]:
    def preview(yard: Yard, caller: Caller, *, scope: str, **more: Any) -> Preview:
        order, roster = _asked(yard, caller, signal, scope, **more)
        workers, name = workers_in(roster.live, order.scope), said(order.scope)
        named = workers[:_MOST_NAMED]
        text = f"{signal} of {name}, {counted(len(workers), 'worker')}: {_EFFECTS[signal]}"
        if signal in _ENDS:
            nobody = f"{name}: no worker is live." if not workers else ""
            needs_yes = order.scope == ALL
            return Preview(nobody or text, named, len(workers), needs_yes=needs_yes)
        state = roster.desired_states.by_scope.get(order.scope, DesiredState())
        if signal == "SET_GENERATION_EPOCH":  # which a form has not asked for yet
            values = {"epoch": (state.epoch or 0) + 1}
            return Preview(text, named, max(1, len(workers)), values=values)
        try:
            is_redundant = after(state, order) == state
        except Invalid as error:
            raise _refused(error, order) from error
        if is_redundant:
            behind = Signals(yard).behind(roster)
            left = [one.worker for one in behind if one.worker in workers]
            text = f"{name} is {state.run_state} already."
            if left:
                text += " Those that refuse try again."
            return Preview(text, left[:_MOST_NAMED], len(left))
        if signal == "UNPAUSE":
            others = other_pauses(roster, order.scope)
            text += "".join(f" Still {one.run_state}: {said(one.scope)}." for one in others)
        # Also without a worker: it is for those who join later.
        return Preview(text, named, max(1, len(workers)))

    return preview


def _give(
    yard: Yard,
    caller: Caller,
    signal: Signal,
    scope: str,
    done: str,
    already: str = "",
    **more: Any,
) -> Outcome:
    """Give a signal; ``already`` is said where there is nothing to change."""
    order, roster = _asked(yard, caller, signal, scope, **more)
    signals, name = Signals(yard), said(order.scope)
    try:
        receipt = signals.give(order)
    except Invalid as error:
        raise _refused(error, order) from error
    is_nobody = signal in _ENDS and not receipt.workers
    others = other_pauses(roster, order.scope)
    still = [
        f"still {one.run_state}: {said(one.scope)}{one.detail(roster.at_ms)}" for one in others
    ]
    if is_nobody:
        text = done = f"{name}: no worker is live"
    elif receipt.is_redundant:
        text = done = f"{name}: {already or f'{done} already'}"
    else:
        text, done = f"{name}: {signal} is given", f"{name}: {done}"
    workers = receipt.workers or workers_in(roster.live, order.scope)
    return Outcome(
        text,
        target=name,
        done=done,
        details={"workers": str(len(workers))},
        fields={
            "signal": signal,
            "scope": order.scope,
            "ids": list(receipt.ids),
            "redundant": receipt.is_redundant,
            "workers": list(receipt.workers),
            "others": {one.scope: one.run_state for one in others},
        },
        notes=still if signal == "UNPAUSE" else (),
        wait=lambda timeout_s: signals.wait(receipt, timeout_s),
    )


@operation("signal.pause", "Pause", _preview_of("PAUSE"))
def pause(yard: Yard, caller: Caller, *, scope: Scope = ALL, mode: Mode = "abort") -> Outcome:
    """Pause workers: they take no new requests, which wait in the queue.

    What happens to running requests, in vLLM's terms:
      abort  they return to the queue immediately, and continue at their next
             token on a running worker, or after `tokenyard unpause`
      wait   they finish
      keep   they stay on their worker with their KV cache, and continue at
             `unpause`; their deadlines still apply

    The pause applies to the model or the name of the worker: a worker that joins later, or returns,
    is paused as well. Leases are renewed and models stay loaded; `tokenyard suspend` frees the
    devices.

    Examples:
      tokenyard pause
      tokenyard pause --mode wait --model adder --timeout 600
      tokenyard pause --worker gpu-1-0 --mode keep --why "look at its driver"
    """
    return _give(yard, caller, "PAUSE", scope, "paused", mode=mode)


@operation("signal.unpause", "Unpause", _preview_of("UNPAUSE"))
def unpause(yard: Yard, caller: Caller, *, scope: Scope = ALL) -> Outcome:
    """Let paused workers run again.

    A worker runs when none of its scopes is paused: all workers, its model, its own name. Scopes
    that are still paused are named.

    Examples:
      tokenyard unpause
      tokenyard unpause --model adder
    """
    return _give(yard, caller, "UNPAUSE", scope, "unpaused", "not paused")


@operation("signal.suspend", "Suspend", _preview_of("SUSPEND"), is_dangerous=True)
def suspend(yard: Yard, caller: Caller, *, scope: Scope = ALL) -> Outcome:
    """Free the devices of paused workers: their engines sleep.

    The workers must be paused; the requests that they kept return to the queue. vLLM's sleep mode
    moves the weights to the host's memory and drops the KV cache. `tokenyard resume` wakes the
    workers, which stay paused.

    Examples:
      tokenyard pause && tokenyard suspend
      tokenyard suspend --model adder --json
    """
    return _give(yard, caller, "SUSPEND", scope, "suspended")


@operation("signal.resume", "Resume", _preview_of("RESUME"))
def resume(yard: Yard, caller: Caller, *, scope: Scope = ALL) -> Outcome:
    """Wake suspended workers; they stay paused until `tokenyard unpause`.

    Examples:
      tokenyard resume && tokenyard unpause
      tokenyard resume --worker gpu-1-0
    """
    return _give(yard, caller, "RESUME", scope, "awake, and paused", "not suspended")


@operation("signal.epoch", "Set the epoch", _preview_of("SET_GENERATION_EPOCH"))
def epoch(yard: Yard, caller: Caller, *, epoch: Epoch, scope: Scope = ALL) -> Outcome:
    """Set the generation epoch, which each later result has in its provenance.

    A loop that trains and generates in turns increases it with each set of weights. The result of a
    request that began under another epoch also has that one (`first_epoch`). `tokenyard models
    reload` changes weights and epoch in one command.

    Examples:
      tokenyard epoch 7
      tokenyard epoch 8 --model policy --json
    """
    signal: Signal = "SET_GENERATION_EPOCH"
    return _give(yard, caller, signal, scope, f"in epoch {epoch}", epoch=epoch)


@operation("signal.drain", "Drain", _preview_of("DRAIN"), is_dangerous=True)
def drain(yard: Yard, caller: Caller, *, scope: Scope = ALL) -> Outcome:
    """End workers when their requests have finished.

    Their processes end and are not replaced; a controller ends when all of its processes have, and
    `tokenyard up` with it. Only workers that are live now end: workers that join later run. To stop
    for a while, use `tokenyard pause`.

    Examples:
      tokenyard drain --worker gpu-1-0 --timeout 600
      tokenyard drain --yes --no-wait
    """
    return _give(yard, caller, "DRAIN", scope, "ended")


@operation("signal.stop", "Stop", _preview_of("STOP"), is_dangerous=True)
def stop(yard: Yard, caller: Caller, *, scope: Scope = ALL) -> Outcome:
    """End workers immediately; their requests return to the queue.

    Their processes end and are not replaced; a controller ends when all of its processes have, and
    `tokenyard up` with it. Only workers that are live now end: workers that join later run. To stop
    for a while, use `tokenyard pause`.

    Examples:
      tokenyard stop --model adder
      tokenyard stop --yes
    """
    return _give(yard, caller, "STOP", scope, "ended")


OPERATIONS: Final[tuple[Operation, ...]] = (pause, unpause, suspend, resume, epoch, drain, stop)
