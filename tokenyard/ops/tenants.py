"""What can be done with tenants: set their share and limits, or remove what is set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypedDict, Unpack

import msgspec
from msgspec import Struct

from tokenyard.ops.names import find
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.protocol.errors import BadInput, BrokerUnavailable, Refused
from tokenyard.protocol.keys import PRIORITY_CLASSES, Yard, is_tenant
from tokenyard.protocol.tenants import (
    DEFAULTS,
    TENANT_RULE,
    TenantSettings,
    decode_each,
    encode_tenant,
)
from tokenyard.protocol.texts import counted, cut, did_you_mean, printable
from tokenyard.scripts import Scripts
from tokenyard.yard.tenants import (
    ALL,
    as_fields,
    differences,
    read_tenants,
    restriction,
    stored_tenants,
    words_of,
)

_FIELDS: Final = {field.name: field.type for field in msgspec.structs.fields(TenantSettings)}
#: Tries of a change that loses the race against other operators.
_MAX_TRIES: Final = 100


class TenantChange(Struct, frozen=True, kw_only=True):
    """New settings of a tenant, or none. ``seen`` is what the change goes by."""

    name: str
    seen: bytes
    before: TenantSettings | None
    after: TenantSettings | None

    @property
    def packed(self) -> bytes:
        """The new settings as they are stored; b"": none."""
        return b"" if self.after is None else encode_tenant(self.after)


def setting_fault(key: str, value: Any) -> str:
    """What is wrong with a setting of a tenant; "" if it is valid."""
    if key not in _FIELDS:
        hint = did_you_mean(key, _FIELDS) or f"; use {', '.join(_FIELDS)}"
        return f"{key}: is not known{hint}"
    try:
        msgspec.convert(value, _FIELDS[key])
    except msgspec.ValidationError as error:
        classes = f"; use {', '.join(PRIORITY_CLASSES)}" if key == "classes" else ""
        return f"{key}: {error}{classes}"
    return ""


def set_tenant(
    yard: Yard, name: str, after: Callable[[TenantSettings], TenantSettings | None]
) -> TenantChange:
    """Change the settings of a tenant, whatever other operators do at the same time.

    ``after`` makes the new settings from the present ones; None removes them. Where nothing is to
    change, nothing is written.
    """
    for _ in range(_MAX_TRIES):
        found: Any = yard.connection.hget(yard.keys.tenants, name)
        seen = bytes(found or b"")
        before = _present(seen)
        change = TenantChange(name=name, seen=seen, before=before, after=after(before or DEFAULTS))
        if change.packed == seen or apply_changes(yard, [change]):
            return change
    raise BrokerUnavailable(f"the settings of {name} were changed by others each time")


def changes_to(
    stored: Mapping[str, bytes], wanted: Mapping[str, TenantSettings]
) -> list[TenantChange]:
    """What is to change so that exactly the wanted tenants have settings, by name."""
    found = []
    for name in sorted({*stored, *wanted}):
        seen, after = stored.get(name, b""), wanted.get(name)
        before = _present(seen)
        if before != after or (seen and before is None):
            found.append(TenantChange(name=name, seen=seen, before=before, after=after))
    return found


def apply_changes(yard: Yard, changes: Sequence[TenantChange]) -> bool:
    """Make all changes at once; False where somebody else has changed one of these tenants."""
    return Scripts(yard).configure([(one.name, one.seen, one.packed) for one in changes])


def _present(seen: bytes) -> TenantSettings | None:
    """Stored settings; None without any that can be read."""
    return decode_each({b"one": seen})["one"] if seen else None


_MOST_SHOWN: Final = 20
_MOST_TOLD: Final = 1_000  # characters of settings in words
_LISTS: Final = ("models", "classes")
#: A longer setting cannot be sent by a form: it stays as it is.
_MOST_SENT: Final = 10_000
_RULE: Final = f"{TENANT_RULE[0].upper()}{TENANT_RULE[1:]}."
_SET: Final = " Changes count at once; what was accepted is never ended."


def _limit(label: str) -> Field:
    return Field(label, "0: no limit.")


Tenant = Annotated[str, Field("Tenant", _RULE, noun="tenant", is_fixed=True)]
Seen = Annotated[str, Field("-", is_hidden=True)]
ChosenTenants = Annotated[tuple[str, ...], Field(noun="tenant")]


class NewSettings(TypedDict, total=False):
    """The settings of a tenant; what is None stays."""

    weight: Annotated[
        float | None,
        Field("Weight", "Tokens are shared in proportion to it.", least=0.001, most=1000),
    ]
    max_waiting_requests: Annotated[int | None, _limit("Requests that may wait")]
    max_waiting_tokens: Annotated[int | None, _limit("Tokens of prompts that may wait")]
    max_running_requests: Annotated[int | None, _limit("Requests that may run at once")]
    tokens_per_minute: Annotated[int | None, _limit("Tokens in and out in any minute")]
    tokens_per_day: Annotated[int | None, _limit("Tokens in and out in any 24 hours")]
    max_tokens: Annotated[int | None, _limit("Tokens that one request may ask for")]
    models: Annotated[list[str] | None, Field("Models that it may use", "With commas, or all.")]
    classes: Annotated[list[str] | None, Field("Priority classes", "high, normal, low, or all.")]
    stream_interval_ms: Annotated[
        int | None, Field("Least ms between events of a stream", "By HTTP; 0: as workers are set.")
    ]


def _preview_set(yard: Yard, caller: Caller, *, tenant: str = "", **given: Any) -> Preview:
    del caller, given
    if not tenant:
        return Preview("Set the share and the limits of a tenant." + _SET, values=_shown(DEFAULTS))
    [view] = read_tenants(yard, [_named(tenant)])
    text = f"Set the share and the limits of {tenant}."
    if not view.is_readable:
        text += " What is set now cannot be read and does not count."
    values = _shown(view.settings) | {"seen": _digest(view.settings)}
    return Preview(text + _SET, values=values)


def _shown(settings: TenantSettings) -> dict[str, str]:
    """What the fields of a form begin with."""
    found = {}
    for name, value in msgspec.structs.asdict(settings).items():
        if name in _LISTS:
            found[name] = ALL if value is None else ",".join(value)
        else:
            found[name] = f"{value:g}" if name == "weight" else str(value)
    return {name: text for name, text in found.items() if len(text) <= _MOST_SENT}


def _digest(settings: TenantSettings) -> str:
    """What the form goes by: a change by somebody else in between is not overwritten."""
    return hashlib.sha256(encode_tenant(settings)).hexdigest()[:16]


@operation("tenant.set", "Set a tenant", _preview_set, role="admin")
def set_one(
    yard: Yard, _caller: Caller, *, tenant: Tenant, seen: Seen = "", **settings: Unpack[NewSettings]
) -> Outcome:
    """Set the share and the limits of a tenant; what is not given stays.

    Changes count at once. What was accepted before is never ended: a lower limit refuses new
    requests until there is room. 0 is no limit.

    Examples:
      tokenyard tenants set research --weight 4
      tokenyard tenants set trial --tokens-per-day 1000000 --classes low --models llama-8b
      tokenyard tenants set trial --tokens-per-day 0 --classes all --models all
    """
    given: dict[str, Any] = {name: one for name, one in settings.items() if one is not None}
    if not given:
        raise BadInput("give at least one setting, such as the weight")
    for name in _LISTS:
        if name in given:
            given[name] = restriction(given[name])
    for name, value in given.items():
        if value is not None and (fault := setting_fault(name, value)):
            raise BadInput(fault, name)

    def after(before: TenantSettings) -> TenantSettings:
        if seen and seen != _digest(before):
            raise Refused(f"somebody else has changed {tenant} meanwhile: go back and look again")
        return msgspec.structs.replace(before, **given)

    change = set_tenant(yard, _named(tenant), after)
    if change.before is None:
        text = f"new, {words_of(change.after)}"
    else:
        text = differences(change.before, change.after) or "nothing to change"
    return Outcome(
        cut(f"{tenant}: {text}", _MOST_TOLD),
        f"tenant {tenant}",
        details={"before": _words(change.before), "after": _words(change.after)},
        fields=change_fields(change),
    )


def change_fields(change: TenantChange) -> dict[str, object]:
    """A change for JSON."""
    return {
        "tenant": change.name,
        "before": as_fields(change.before),
        "after": as_fields(change.after),
    }


def _words(settings: TenantSettings | None) -> str:
    return cut(words_of(settings), _MOST_TOLD)


def _named(text: str) -> str:
    if not is_tenant(text):
        raise BadInput(f"tenant: '{printable(text[:200])}': {TENANT_RULE}", "tenant")
    return text


def _preview_remove(yard: Yard, _caller: Caller, *, tenant: Sequence[str]) -> Preview:
    views = [one for one in read_tenants(yard, map(_named, tenant)) if one.is_set]
    if not views:
        return Preview("Nothing is set for what was selected.", count=0)
    return Preview(
        f"Remove what is set for {counted(len(views), 'tenant')}: weight 1 and no limits are left."
        " Waiting requests, keys of the gateway and usage stay.",
        [f"{one.name}: {_words(one.settings)}" for one in views[:_MOST_SHOWN]],
        len(views),
    )


@operation(
    "tenant.remove", "Remove settings of tenants", _preview_remove, role="admin", is_dangerous=True
)
def remove(yard: Yard, _caller: Caller, *, tenant: ChosenTenants) -> Outcome:
    """Remove what is set for tenants: they have weight 1 and no limits then.

    Their waiting requests, keys of the gateway and usage stay.

    Examples:
      tokenyard tenants remove trial
      tokenyard tenants remove trial nightly
    """
    stored = stored_tenants(yard)
    for name in tenant:
        find("tenant", name, stored)
    changes = [set_tenant(yard, name, lambda _: None) for name in dict.fromkeys(tenant)]
    return Outcome(
        f"settings of {counted(len(changes), 'tenant')} removed",
        ", ".join(f"tenant {change.name}" for change in changes[:_MOST_SHOWN]),
        details={change.name: _words(change.before) for change in changes[:_MOST_SHOWN]},
        fields={"changes": [change_fields(change) for change in changes]},
    )


OPERATIONS: Final[tuple[Operation, ...]] = (set_one, remove)
