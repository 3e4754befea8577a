"""The page that asks whether to do it, and asks again where what was typed is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tokenyard.board.forms import hidden_fields, read_back
from tokenyard.board.operations import Form, Input
from tokenyard.board.yard import Parameters
from tokenyard.ops.operation import Operation
from tokenyard.protocol.errors import Refused

#: The field of the form that names those that the operator has filled in.
ASKED: Final = "asked"
_WHY: Final = "why"


def ask(op: Operation, form: Form, given: Parameters) -> dict[str, Any]:
    """What the page shows: the preview, and a form that sends on what was given."""
    names = [one.name for one in form.inputs]
    return {
        "action": op,
        "back": read_back(given),
        "preview": form,
        "hidden": hidden_fields(given, dict.fromkeys((_WHY, "done", ASKED, *names))),
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
    inputs = [replace(one, value=_typed(one, sent.values)) for one in form.inputs]
    shown = {one.name for one in inputs if one.kind != "hidden"}
    return {
        **ask(op, replace(form, inputs=inputs), first),
        "why": sent.text(_WHY),
        "error": str(error),
        "wrong": error.field if error.field in shown else "",
    }


def _typed(one: Input, values: Mapping[str, Any]) -> str:
    found = values.get(one.name)
    if one.kind == "checkbox":
        return "on" if found else ""
    return str(found[0]) if found else one.value
