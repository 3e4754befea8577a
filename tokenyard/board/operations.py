"""The form of an operation: its fields, its confirmation and its result."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from tokenyard import clock
from tokenyard.admin.audit import AuditEntry, record
from tokenyard.board.action import Action, Input, Preview
from tokenyard.board.yard import Parameters
from tokenyard.broker.connection import translated
from tokenyard.ops.operation import Caller, Operation, Outcome, Parameter
from tokenyard.protocol.errors import BadInput, Refused, TokenyardError
from tokenyard.protocol.yard import Yard

log = logging.getLogger("tokenyard.board")

#: A page waits so long for a long operation: what is refused is refused by then.
_SOON_S: Final = 1.0


def action_of(op: Operation) -> Action:
    """The operation as the board shows it."""
    run = partial(_begin if op.is_long else _run, op)
    return Action(op.name, op.title, op.role, partial(_preview, op), run, op.is_dangerous)


def _preview(op: Operation, yard: Yard, given: Parameters) -> Preview:
    # What the operator fills in has no value yet.
    values = {
        one.name: _read(one, given)
        for one in op.parameters
        if given.text(one.name) or not one.field.label
    }
    shown = op.preview(yard, _caller(given), **values)
    inputs = [
        _input(one, given, shown.values.get(one.name))
        for one in op.parameters
        if one.field.label and not (one.field.is_fixed and given.text(one.name))
    ]
    return Preview(shown.text, inputs, shown.items, shown.count)


def _run(op: Operation, yard: Yard, given: Parameters) -> Outcome:
    values = {one.name: _read(one, given) for one in op.parameters}
    outcome = op.run(yard, _caller(given), **values)
    text = ". ".join([outcome.text, *outcome.notes])
    details = {**op.details(values), **outcome.details}
    return replace(outcome, text=f"{text.rstrip('.')}.", details=details)


def _begin(op: Operation, yard: Yard, given: Parameters) -> Outcome:
    """Begin a long operation. A result that comes soon is returned; a later one is audited."""
    return _Long(op, yard, given).begin()


def _caller(given: Parameters) -> Caller:
    return Caller(given.actor.name, given.actor.role, given.why)


def _read(one: Parameter, given: Parameters) -> Any:
    """The value that was sent; a scope that no page has given is not all workers."""
    if one.field.noun == "scope" and not given.text(one.name):
        raise BadInput(f"{one.name}: give it", one.name)
    return one.read([text.strip() for text in given.texts(one.name)])


def _input(one: Parameter, given: Parameters, known: Any) -> Input:
    usual = "" if one.is_required or one.default is None else one.default
    value = given.text(one.name) or str(usual if known is None else known)
    kind = {int: "number", bool: "checkbox"}.get(one.type, "text")
    if one.field.is_hidden:
        return Input(one.name, "", value, kind="hidden")
    must = one.is_required and not one.field.may_be_empty
    choices = one.choices if one.default is not None or not one.choices else ("", *one.choices)
    return Input(one.name, one.field.label, value, choices, one.field.hint, kind, must)


@dataclass(slots=True)
class _Long:
    """An operation that waits for workers, in a thread of its own."""

    op: Operation
    yard: Yard
    given: Parameters
    outcome: Outcome | None = None
    error: Refused | None = None  # why it has failed
    is_late: bool = False  # its outcome is for the audit: nobody waits for it any more
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> Outcome:
        """Start it, and wait a moment; raises `Refused`."""
        for one in self.op.parameters:
            _read(one, self.given)  # a mistake is told before anything begins
        threading.Thread(target=self._carry_out, name=self.op.name, daemon=True).start()
        clock.wait(self._done, _SOON_S)
        with self._lock:
            self.is_late = not self._done.is_set()
        if self.error:
            raise self.error
        begun = f"{self.op.title}: it has begun. The audit will tell how it ends."
        return self.outcome or Outcome(begun, self._target)

    @property
    def _target(self) -> str:
        named = (one for one in self.op.parameters if one.field.noun)
        return ", ".join(f"{one.field.noun} {_read(one, self.given)}" for one in named)

    def _carry_out(self) -> None:
        outcome, error = None, None
        try:
            with translated(self.yard.url):
                outcome = _run(self.op, self.yard, self.given)
        except TokenyardError as refused:
            error = refused if isinstance(refused, Refused) else Refused(str(refused))
        except Exception:
            # Without an outcome the operator would read for ever that it has begun.
            log.exception("%s has failed", self.op.name)
            error = Refused("it has failed; the board's log says why")
        with self._lock:
            self.outcome, self.error = outcome, error
            self._done.set()
            is_late = self.is_late
        if is_late:
            self._record()

    def _record(self) -> None:
        """Write how it has ended to the audit."""
        entry = AuditEntry(
            who=self.given.actor.name,
            role=self.given.actor.role,
            action=self.op.name,
            target=self._target,
            why=self.given.why,
            text=self.outcome.text if self.outcome else "",
            error=str(self.error or ""),
        )
        try:
            with translated(self.yard.url):
                record(self.yard, entry)
        except TokenyardError as error:
            log.warning("the end of %s is not in the audit: %s", self.op.name, error)
