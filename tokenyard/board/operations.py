"""The form of an operation: its fields, its confirmation and its result."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final

from tokenyard import clock
from tokenyard.board.forms import read_back
from tokenyard.board.page import Parameters
from tokenyard.broker.connection import translated
from tokenyard.ops import batches, intakes, keys, letters, models, requests, signals, tenants
from tokenyard.ops.audit import record
from tokenyard.ops.operation import (
    Caller,
    Done,
    Operation,
    Outcome,
    Parameter,
    Preview,
    carry_out,
    entry_of,
)
from tokenyard.protocol.errors import BadInput, Refused, TokenyardError
from tokenyard.protocol.keys import Yard

#: The field of the form that names those that the operator has filled in.
ASKED: Final = "asked"
_WHY: Final = "why"

log = logging.getLogger("tokenyard.board")

#: All that can be done, by name.
OPERATIONS: Final[Mapping[str, Operation]] = {
    op.name: op
    for module in (signals, models, requests, intakes, letters, tenants, keys, batches)
    for op in module.OPERATIONS
}
#: A page waits so long for a long operation: what is refused is refused by then.
_SOON_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Input:
    """A field that the operator fills in on the page that asks whether to do it."""

    name: str
    label: str
    value: str = ""
    choices: Sequence[str] = ()  # a list to choose from, in place of a text
    hint: str = ""
    kind: str = "text"  # of HTML: text, number, checkbox, hidden
    is_required: bool = False


#: The page that asks whether to do it.
Form = tuple[Preview, Sequence[Input]]


def form_of(op: Operation, yard: Yard, given: Parameters) -> Form:
    """The form with what was given; raises `Refused` where there is nothing to ask."""
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
    return shown, inputs


def run(op: Operation, yard: Yard, given: Parameters) -> Done:
    """Carry it out. Of a long one a result that comes soon is returned, a later one is audited."""
    values = {one.name: _read(one, given) for one in op.parameters}
    if op.is_long:
        return _run_long(op, yard, _caller(given), values)
    return carry_out(yard, op, _caller(given), values)


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
    if one.field.is_hidden:
        return Input(one.name, "", value, kind="hidden")
    kind = {int: "number", bool: "checkbox"}.get(one.type, "text")
    if kind == "checkbox":
        value = "on" if value in {"on", "True"} else ""
    must = one.is_required and not one.field.may_be_empty
    choices = one.choices if one.default is not None or not one.choices else ("", *one.choices)
    return Input(one.name, one.field.label, value, choices, one.field.hint, kind, must)


def _run_long(op: Operation, yard: Yard, caller: Caller, values: Mapping[str, Any]) -> Done:
    """Carry it out in a thread of its own, and wait a moment; raises `Refused`.

    If it goes on, how it ends is another entry of the audit.
    """
    done, is_over = Future[Done](), threading.Event()
    done.add_done_callback(lambda _: is_over.set())

    def work() -> None:
        try:
            with translated(yard.url):
                done.set_result(carry_out(yard, op, caller, values))
        except TokenyardError as error:
            done.set_exception(error if isinstance(error, Refused) else Refused(str(error)))
        except Exception:
            # Without an outcome the operator would read for ever that it has begun.
            log.exception("%s has failed", op.name)
            done.set_exception(Refused("it has failed; the board's log says why"))

    threading.Thread(target=work, name=op.name, daemon=True).start()
    if clock.wait(is_over, _SOON_S):
        return done.result()
    entry = entry_of(op, caller, values)
    text = f"{op.title}: it has begun. The audit will tell how it ends"
    begun = Outcome(text, entry.target)
    return Done(begun, record(yard, replace(entry, text=begun.told)))


def ask(op: Operation, form: Form, given: Parameters) -> dict[str, Any]:
    """What the page shows: the preview, and a form that sends on what was given."""
    preview, inputs = form
    names = [one.name for one in inputs]
    return {
        "action": op,
        "back": read_back(given),
        "preview": preview,
        "inputs": inputs,
        "hidden": [
            (name, value)
            for name, values in given.values.items()
            if name not in (_WHY, "done", ASKED, *names)
            for value in values
        ],
        "asked": ",".join(names),
        "why": "",
        "error": "",
        "wrong": "",
    }


def as_first_asked(sent: Parameters) -> Parameters | None:
    """What the page was asked with, by the form that it has sent; None for a form of another."""
    if ASKED not in sent.values:
        return None
    typed = {_WHY, ASKED, *sent.text(ASKED).split(",")}
    return replace(sent, values={n: found for n, found in sent.values.items() if n not in typed})


def ask_again(
    op: Operation, form: Form, first: Parameters, sent: Parameters, error: Refused
) -> dict[str, Any]:
    """The page that was asked with ``first``, with what was typed and what is wrong with it."""
    preview, asked = form
    inputs = [replace(one, value=_typed(one, sent.values)) for one in asked]
    shown = {one.name for one in inputs if one.kind != "hidden"}
    return {
        **ask(op, (preview, inputs), first),
        "why": sent.text(_WHY),
        "error": str(error),
        "wrong": error.field if error.field in shown else "",
    }


def _typed(one: Input, values: Mapping[str, Any]) -> str:
    found = values.get(one.name)
    if one.kind == "checkbox":
        return "on" if found else ""
    return str(found[0]) if found else one.value
