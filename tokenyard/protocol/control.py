"""Control signals of operators, the desired states that they result in, and commands to workers.

A desired state is kept for each scope, so that it also applies to workers that join later or come
back. The desired state of a worker combines those of all scopes that it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import msgspec
from msgspec import Struct

from tokenyard.protocol.streams import decoded, readable

#: Megatron Core's control signals, and one for new weights. DRAIN and STOP end worker processes
#: and change no desired state, see `tokenyard.ops.control`.
Signal = Literal[
    "PAUSE",
    "UNPAUSE",
    "SUSPEND",
    "RESUME",
    "SET_GENERATION_EPOCH",
    "RELOAD_WEIGHTS",
    "DRAIN",
    "STOP",
]
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)

#: vLLM's modes for running requests. ``abort``: they go back to the queue immediately and continue
#: at their next token. ``wait``: they finish. ``keep``: they stay, and the engine does not step.
PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: Final[tuple[PauseMode, ...]] = get_args(PauseMode)

#: A paused worker gets and runs no requests; a suspended one has also released its device.
RunState = Literal["RUNNING", "PAUSED", "SUSPENDED"]
RUN_STATES: Final[tuple[RunState, ...]] = get_args(RunState)

ALL: Final = "all"
_MODEL, _WORKER = "model:", "worker:"


def model_scope(model: str) -> str:
    """The scope of all workers with a model, now or later."""
    return f"{_MODEL}{model}"


def worker_scope(name: str) -> str:
    """The scope of the worker of this name, in any incarnation."""
    return f"{_WORKER}{name}"


def said(scope: str) -> str:
    """A scope in words."""
    kind, _, name = scope.partition(":")
    return f"{kind} {name}" if name else "all workers"


def is_scope(text: str) -> bool:
    """Whether ``text`` is a scope."""
    return text == ALL or (text.startswith((_MODEL, _WORKER)) and not text.endswith(":"))


class Trial(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is restored where a reload fails, or its caller disappears."""

    until_ms: int  # unix time by the server's clock; then the leader undoes it
    weights: str = ""
    run_state: RunState = "RUNNING"


class DesiredState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state that an operator wants for the workers of a scope."""

    run_state: RunState = "RUNNING"
    mode: PauseMode = "abort"  # while not RUNNING: how running requests were treated
    epoch: int | None = None  # stamped on results; None: none was set
    weights: str = ""  # path of a checkpoint that replaces the model's own; "": its own
    # While not RUNNING, of the order that set this state:
    by: str = ""  # the operator, as user@host
    why: str = ""  # a reason, free text
    since_ms: int = 0  # unix time by the server's clock; 0: unknown
    trial: Trial | None = None  # while a reload is under way


class Order(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A signal with its arguments, as the control stream carries it."""

    signal: Signal
    scope: str = ALL
    mode: PauseMode = "abort"  # PAUSE
    epoch: int | None = None  # SET_GENERATION_EPOCH
    weights: str = ""  # RELOAD_WEIGHTS
    why: str = ""  # a reason, free text
    by: str = ""  # the operator, as user@host
    trial: Trial | None = None  # of a reload: PAUSE, RELOAD_WEIGHTS, SET_GENERATION_EPOCH


@dataclass(frozen=True, slots=True)
class Rule:
    """The run states in which a signal is allowed or without effect, and the one it leads to."""

    allowed: frozenset[RunState]
    idempotent: frozenset[RunState] = frozenset()
    leads_to: RunState | None = None  # None: unchanged
    hint: str = ""  # what to do first where it is not allowed


_ANY: Final = frozenset(RUN_STATES)

#: The transition table: docs/states.md, "A desired state", is its public form.
TRANSITIONS: Final[Mapping[Signal, Rule]] = {
    "PAUSE": Rule(frozenset({"RUNNING"}), frozenset({"PAUSED", "SUSPENDED"}), "PAUSED"),
    "UNPAUSE": Rule(
        frozenset({"PAUSED"}), frozenset({"RUNNING"}), "RUNNING", hint="RESUME it first"
    ),
    "SUSPEND": Rule(
        frozenset({"PAUSED"}), frozenset({"SUSPENDED"}), "SUSPENDED", hint="PAUSE it first"
    ),
    "RESUME": Rule(frozenset({"SUSPENDED"}), frozenset({"PAUSED", "RUNNING"}), "PAUSED"),
    "SET_GENERATION_EPOCH": Rule(_ANY),
    "RELOAD_WEIGHTS": Rule(frozenset({"PAUSED"}), hint="PAUSE it first"),
    "DRAIN": Rule(_ANY),
    "STOP": Rule(_ANY),
}


class Invalid(Exception):
    """A signal that is not allowed in its scope now; the message has the reason."""


def after(desired_state: DesiredState, order: Order, now_ms: int = 0) -> DesiredState:
    """The desired state after an order; the same object where it changes nothing.

    ``now_ms`` is unix time by the server's clock, 0 where it does not matter.

    Raises:
        Invalid: the signal is not allowed now, or lacks an argument.
    """
    rule = TRANSITIONS[order.signal]
    if desired_state.run_state in rule.idempotent:
        return desired_state
    if desired_state.run_state not in rule.allowed:
        hint = f": {rule.hint}" if rule.hint else ""
        raise Invalid(f"{order.signal}: {order.scope} is {desired_state.run_state}{hint}")
    changed = msgspec.structs.replace(
        desired_state, run_state=rule.leads_to or desired_state.run_state
    )
    match order.signal:
        case "PAUSE":
            return _held(
                msgspec.structs.replace(changed, mode=order.mode, trial=order.trial), order, now_ms
            )
        case "SUSPEND":
            return _held(changed, order, now_ms)
        case "UNPAUSE":
            return _running(changed)
        case "SET_GENERATION_EPOCH":
            trial = order.trial or changed.trial
            return msgspec.structs.replace(changed, epoch=_epoch(order), trial=trial)
        case "RELOAD_WEIGHTS":
            return msgspec.structs.replace(changed, weights=_weights(order), trial=order.trial)
        case _:
            return changed


def _held(desired_state: DesiredState, order: Order, now_ms: int) -> DesiredState:
    """With its operator, time and reason; a suspend without a reason keeps that of the pause."""
    return msgspec.structs.replace(
        desired_state, by=order.by, why=order.why or desired_state.why, since_ms=now_ms
    )


def _running(desired_state: DesiredState) -> DesiredState:
    """Running, without the data of the order that had paused it."""
    return msgspec.structs.replace(
        desired_state,
        run_state="RUNNING",
        mode=DesiredState().mode,
        by="",
        why="",
        since_ms=0,
        trial=None,
    )


def restored(desired_state: DesiredState) -> DesiredState:
    """The desired state before the reload in progress; without one, the same.

    A scope that an operator has suspended meanwhile stays suspended.
    """
    trial, run_state = desired_state.trial, desired_state.run_state
    if trial is None:
        return desired_state
    if run_state == "PAUSED":
        run_state = trial.run_state
    before = msgspec.structs.replace(
        desired_state, run_state=run_state, weights=trial.weights, trial=None
    )
    return _running(before) if run_state == "RUNNING" else before


def undo_reload(scope: str, desired_state: DesiredState, why: str) -> tuple[Order, DesiredState]:
    """The order that undoes a reload in progress, and the desired state after it."""
    before = restored(desired_state)
    return Order(signal="RELOAD_WEIGHTS", scope=scope, weights=before.weights, why=why), before


def _epoch(order: Order) -> int:
    if order.epoch is None or order.epoch < 0:
        raise Invalid(f"{order.signal}: give the epoch, a whole number from 0")
    return order.epoch


def _weights(order: Order) -> str:
    if not order.scope.startswith(_MODEL):
        raise Invalid(f"{order.signal}: weights belong to a model: use the scope model:<name>")
    return order.weights


@dataclass(frozen=True, slots=True)
class DesiredStates:
    """The desired states of all scopes at one moment."""

    by_scope: Mapping[str, DesiredState] = field(default_factory=dict)
    changed: str = "0-0"  # id of the control entry that last changed one

    def of(self, worker: str, model: str) -> DesiredState:
        """The desired state of a worker by its name, with this model ("" for none).

        The run state and mode are those of the strictest scope (of several, the most forceful
        mode); epoch and weights are those of the narrowest scope that sets them.
        """
        scopes = (ALL, model_scope(model), worker_scope(worker))
        found = [self.by_scope[scope] for scope in scopes if scope in self.by_scope]
        strictest = max(found, key=_strictness, default=DesiredState())
        epochs = [one.epoch for one in found if one.epoch is not None]
        weights = [one.weights for one in found if one.weights]
        return DesiredState(
            run_state=strictest.run_state,
            mode=strictest.mode,
            epoch=epochs[-1] if epochs else None,
            weights=weights[-1] if weights else "",
        )

    def is_running(self, worker: str, model: str) -> bool:
        """Whether this worker, with this model, may get requests."""
        return self.of(worker, model).run_state == "RUNNING"


def _strictness(desired_state: DesiredState) -> tuple[int, int]:
    return RUN_STATES.index(desired_state.run_state), -PAUSE_MODES.index(desired_state.mode)


_desired_decoder = msgspec.json.Decoder(DesiredState)
_order_decoder = msgspec.json.Decoder(Order)
#: Field of the hash `desired` that is not a scope.
CHANGED: Final = "changed"


def encode_desired(desired_state: DesiredState) -> bytes:
    """A desired state as JSON; empty for the default state."""
    return b"" if desired_state == DesiredState() else msgspec.json.encode(desired_state)


def decode_desired(fields: Mapping[bytes, bytes]) -> DesiredStates:
    """Read the hash `desired`; values that cannot be read are skipped."""
    by_scope = {name: packed for name, packed in fields.items() if name != CHANGED.encode()}
    changed = fields.get(CHANGED.encode(), b"0-0").decode(errors="replace")
    return DesiredStates(dict(readable(by_scope, _desired_decoder.decode)), changed)


def parse_order(fields: Mapping[bytes, bytes]) -> Order | None:
    """The order of an entry; None where it has none that this version can read."""
    return decoded(fields.get(b"signal", b""), _order_decoder.decode)


# Commands to workers, and their acknowledgements.
#
# Commands are sent on the stream ``control``; each controller reads all of it and carries out those
# for its workers. The roster shows the effect; acknowledgements are for a caller that waits.

Verb = Literal["load", "unload", "sleep", "wake", "drain", "stop", "check"]


class Command(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command to one worker; all verbs are idempotent.

    ``load`` makes the worker's device serve ``model``: running requests may finish, then the
    previous model sleeps (where the host keeps sleepers) or is unloaded. With ``devices`` it forms
    a group on these, the worker's first.

    ``drain`` and ``stop`` end the worker's process for good: ``drain`` after its running requests,
    ``stop`` immediately, so that they go back to the queue.

    ``check`` changes nothing: the worker's host checks whether ``model`` could have ``weights``.
    """

    verb: Verb
    worker: str  # with its incarnation: a command never reaches a successor
    model: str = ""  # load, check
    devices: list[int] = msgspec.field(default_factory=list)  # load of a group
    level: int = 1  # sleep: vLLM's sleep level
    why: str = ""  # a reason, free text
    by: str = ""  # drain, stop: the operator, as user@host
    weights: str = ""  # check: path of a checkpoint


class Acknowledgement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of a command at one worker."""

    worker: str
    done: bool
    reason: str = ""  # where it is not done


_command_decoder = msgspec.json.Decoder(Command)
decode_acknowledgement: Final = msgspec.json.Decoder(Acknowledgement).decode


def parse_command(fields: Mapping[bytes, bytes]) -> Command | None:
    """The command of an entry; None where it has none that this version can read."""
    return decoded(fields.get(b"command", b""), _command_decoder.decode)
