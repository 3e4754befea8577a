"""What an operator does to tenants: set their share and limits, or remove what is set."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tokenyard.admin.tenant_texts import differences, restriction, words_of
from tokenyard.admin.tenants import TenantView, read_tenants, set_tenant
from tokenyard.admin.tenants_file import FIELDS, setting_fault
from tokenyard.board.action import Action, ActionRefused, Input, Outcome, Preview
from tokenyard.board.cutting import cut
from tokenyard.board.yard import MAX_PARAMETER, BadInput, Parameters
from tokenyard.protocol.keys import is_tenant
from tokenyard.protocol.tenants import TENANT_RULE, TenantSettings, encode_tenant
from tokenyard.protocol.texts import counted, printable
from tokenyard.protocol.yard import Yard

_LABELS: Final = {
    "weight": ("Weight", "Tokens are shared in proportion to it."),
    "max_waiting_requests": ("Requests that may wait", "0: no limit"),
    "max_waiting_tokens": ("Tokens of prompts that may wait", "0: no limit"),
    "max_running_requests": ("Requests that may run at once", "0: no limit"),
    "tokens_per_minute": ("Tokens in and out in any minute", "0: no limit"),
    "tokens_per_day": ("Tokens in and out in any 24 hours", "0: no limit"),
    "max_tokens": ("Tokens that one request may ask for", "0: no limit"),
    "models": ("Models that it may use", "with commas; empty: all"),
    "classes": ("Priority classes", "high, normal, low, with commas; empty: all"),
}
_LISTS: Final = ("models", "classes")
_MOST_SHOWN: Final = 20
_MOST_TOLD: Final = 1_000  # characters of settings in words


def _preview_set(yard: Yard, given: Parameters) -> Preview:
    name = given.text("tenant")
    if not name:
        rule = TENANT_RULE[0].upper() + TENANT_RULE[1:]
        inputs = [Input("tenant", "Tenant", hint=rule, is_required=True)]
        return Preview(
            "Set the share and the limits of a tenant. Changes count at once; what was accepted is"
            " never ended.",
            [*inputs, *_inputs(TenantSettings())],
        )
    view = _view(yard, name)
    text = f"Set the share and the limits of {name}."
    if not view.is_readable:
        text += " What is set now cannot be read and does not count."
    text += " Changes count at once; what was accepted is never ended."
    return Preview(text, [*_inputs(view.settings), _seen(view.settings)])


def _inputs(settings: TenantSettings) -> Sequence[Input]:
    """A field for each setting; one that no form can send stays as it is."""
    fields = [
        Input(name, *_field(name, getattr(settings, name)), hint=hint)
        for name, (_, hint) in _LABELS.items()
    ]
    return [one for one in fields if len(one.value) <= MAX_PARAMETER]


def _field(name: str, value: object) -> tuple[str, str]:
    label = _LABELS[name][0]
    if isinstance(value, list):
        return label, ",".join(map(str, value))
    return label, "" if value is None else f"{value:g}" if name == "weight" else str(value)


def _seen(settings: TenantSettings) -> Input:
    """What the form goes by: a change by somebody else in between is not overwritten."""
    digest = hashlib.sha256(encode_tenant(settings)).hexdigest()
    return Input("seen", "", digest[:16], kind="hidden")


def _set(yard: Yard, given: Parameters) -> Outcome:
    name = _name(given.text("tenant"))
    values = dict(_value(key, given) for key in FIELDS if given.values.get(key))
    seen = given.text("seen")

    def after(before: TenantSettings) -> TenantSettings:
        if seen and seen != _seen(before).value:
            changed = f"Somebody else has changed {name} meanwhile"
            raise ActionRefused(f"{changed}: go back and look again.")
        return msgspec.structs.replace(before, **values)

    change = set_tenant(yard, name, after)
    if change.before is None:
        text = f"{name}: new, {words_of(change.after)}"
    else:
        text = f"{name}: {differences(change.before, change.after) or 'nothing to change'}"
    details = {"before": _words(change.before), "after": _words(change.after)}
    return Outcome(cut(text, _MOST_TOLD), f"tenant {name}", details=details)


def _words(settings: TenantSettings | None) -> str:
    return cut(words_of(settings), _MOST_TOLD)


def _value(key: str, given: Parameters) -> tuple[str, Any]:
    text = given.text(key)
    try:
        value = _read(key, text)
    except ValueError as error:
        raise ActionRefused(f"{_LABELS[key][0]}: {text[:50]!r} is no number.", key) from error
    if value is not None and (fault := setting_fault(key, value)):
        raise ActionRefused(f"{_LABELS[key][0]}: {fault.partition(': ')[2]}", key)
    return key, value


def _read(key: str, text: str) -> Any:
    """The text of a field as the value of a setting; raises `ValueError`."""
    if key in _LISTS:
        return restriction([word for part in text.split(",") if (word := part.strip())])
    if key == "weight":
        return float(text or TenantSettings().weight)
    digits = text.replace(",", "").replace(" ", "")
    if len(digits) > 20:
        raise ValueError(text)
    return int(digits or 0)


def _preview_remove(yard: Yard, given: Parameters) -> Preview:
    names = _names(given)
    views = [one for one in read_tenants(yard, names) if one.is_set]
    if not views:
        return Preview("Nothing is set for what was selected.", count=0)
    return Preview(
        f"Remove what is set for {counted(len(views), 'tenant')}: weight 1 and no limits are left."
        " Waiting requests, keys of the gateway and usage stay.",
        items=[f"{one.name}: {_words(one.settings)}" for one in views[:_MOST_SHOWN]],
        count=len(views),
    )


def _remove(yard: Yard, given: Parameters) -> Outcome:
    names = [one.name for one in read_tenants(yard, _names(given))]
    changes = [set_tenant(yard, name, lambda _: None) for name in names]
    removed = [change for change in changes if change.seen]
    if not removed:
        raise ActionRefused("Nothing is set for what was selected.")
    return Outcome(
        f"Settings of {counted(len(removed), 'tenant')} removed.",
        ", ".join(f"tenant {change.name}" for change in removed[:_MOST_SHOWN]),
        details={change.name: _words(change.before) for change in removed[:_MOST_SHOWN]},
    )


def _names(given: Parameters) -> list[str]:
    names = list(dict.fromkeys(_name(text.strip()) for text in given.texts("tenant")))
    if not names:
        raise BadInput("tenant: select at least one")
    return names


def _name(text: str) -> str:
    if not is_tenant(text):
        raise BadInput(f"tenant '{printable(text[:200])}': {TENANT_RULE}", "tenant")
    return text


def _view(yard: Yard, name: str) -> TenantView:
    [view] = read_tenants(yard, [_name(name)])
    return view


ACTIONS: Final[tuple[Action, ...]] = (
    Action("tenant.set", "Set a tenant", "admin", _preview_set, _set),
    Action(
        "tenant.remove",
        "Remove settings of tenants",
        "admin",
        _preview_remove,
        _remove,
        is_dangerous=True,
    ),
)
