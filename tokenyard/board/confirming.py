"""The page that asks whether to do an action, and asks again where what was typed is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tokenyard.board.action import Action, Input, Preview
from tokenyard.board.forms import hidden_fields, read_back
from tokenyard.board.yard import Parameters
from tokenyard.protocol.errors import Refused

#: The field of the form that names those that the operator has filled in.
ASKED: Final = "asked"
_WHY: Final = "why"


def ask(action: Action, preview: Preview, given: Parameters) -> dict[str, Any]:
    """What the page shows: the preview, and a form that sends on what was given."""
    names = [one.name for one in preview.inputs]
    return {
        "action": action,
        "back": read_back(given),
        "preview": preview,
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
    action: Action, preview: Preview, first: Parameters, sent: Parameters, error: Refused
) -> dict[str, Any]:
    """The page that was asked with ``first``, with what was typed and what is wrong with it."""
    inputs = [replace(one, value=_typed(one, sent.values)) for one in preview.inputs]
    shown = {one.name for one in inputs if one.kind != "hidden"}
    return {
        **ask(action, replace(preview, inputs=inputs), first),
        "why": sent.text(_WHY),
        "error": str(error),
        "wrong": error.field if error.field in shown else "",
    }


def _typed(one: Input, values: Mapping[str, Any]) -> str:
    found = values.get(one.name)
    if one.kind == "checkbox":
        return "on" if found else ""
    return str(found[0]) if found else one.value
