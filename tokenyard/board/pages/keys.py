"""Keys of the gateway and the board: list, create, revoke."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from tokenyard.admin.api_keys import MAX_NAME, create_key, list_keys, revoke_key
from tokenyard.admin.tenant_texts import restriction
from tokenyard.board.action import Action, ActionRefused, Input, Outcome, Preview
from tokenyard.board.cutting import cut
from tokenyard.board.page import Page
from tokenyard.board.paging import numbered_page
from tokenyard.board.yard import BadInput, Parameters
from tokenyard.protocol.api_keys import ApiKey, Role
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import PRIORITY_CLASSES, PriorityClass
from tokenyard.protocol.tenants import TENANT_RULE
from tokenyard.protocol.texts import counted, printable
from tokenyard.protocol.yard import Yard

#: Keys on one page.
PER_PAGE: Final = 100
_MOST_SHOWN: Final = 20
_MOST_MODELS: Final = 100
_NO_ROLE: Final = "none"
_ROLES: Final = (_NO_ROLE, *get_args(Role))


def _keys(yard: Yard, given: Parameters) -> dict[str, Any]:
    tenant = given.text("tenant")
    everything = list_keys(yard)
    found = [one for one in everything.items() if tenant in {"", one[1].tenant}]
    found.reverse()  # the newest first
    page = numbered_page(given, len(found), PER_PAGE, "/keys", tenant=tenant)
    return {
        "tenant": tenant,
        "found": found[page.first : page.end],
        "total": len(found),
        "numbered": page,
    }


def _preview_create(yard: Yard, given: Parameters) -> Preview:
    del yard
    return Preview(
        "A key opens the gateway for a tenant, the board with a role, or both. It is shown once.",
        [
            Input("tenant", "Tenant", given.text("tenant"), hint=f"{TENANT_RULE}; empty: none"),
            Input("role", "Role at the board", _NO_ROLE, _ROLES),
            Input("name", "Name", hint="what it is for"),
            Input("models", "Models that it may use", hint="with commas; empty: all"),
            Input(
                "classes",
                "Priority classes that it may use",
                hint="high, normal, low, with commas; empty: all",
            ),
        ],
    )


def _create(yard: Yard, given: Parameters) -> Outcome:
    tenant, role = given.text("tenant"), given.one_of("role", _ROLES, _NO_ROLE)
    name, models = given.text("name"), _words(given, "models")
    if len(name) > MAX_NAME:
        raise BadInput(f"name: give {MAX_NAME} characters at most", "name")
    if len(models) > _MOST_MODELS:
        raise BadInput(f"models: give {_MOST_MODELS} at most", "models")
    classes = [_class(word) for word in _words(given, "classes")]
    if not tenant and role == _NO_ROLE:
        raise ActionRefused(
            "Give a tenant, a role, or both: otherwise the key would open nothing.", "tenant"
        )
    try:
        key, key_id = create_key(
            yard,
            tenant,
            name=name,
            models=models or None,
            classes=classes or None,
            role=next((one for one in get_args(Role) if one == role), None),
        )
    except InvalidRequest as error:
        raise ActionRefused(str(error), error.field) from error
    whose = _whose(tenant, role)
    return Outcome(
        f"Key {key_id} {whose} created.",
        f"key {key_id} {whose}",
        secret=key,
        details={"name": name, "models": ",".join(models), "classes": ",".join(classes)},
    )


def _words(given: Parameters, name: str) -> list[str]:
    """The words of a list; empty: all."""
    listed = [word for part in given.text(name).split(",") if (word := part.strip())]
    return restriction(listed) or []


def _class(word: str) -> PriorityClass:
    for known in PRIORITY_CLASSES:
        if word == known:
            return known
    known_words = ", ".join(PRIORITY_CLASSES)
    raise ActionRefused(f"There is no class {word[:50]!r}: use {known_words}.", "classes")


def _whose(tenant: str, role: str | None) -> str:
    """``of research, with the role operator``."""
    parts = [f"of {printable(tenant)}"] if tenant else []
    parts += [f"with the role {role}"] if role and role != _NO_ROLE else []
    return ", ".join(parts)


def _preview_revoke(yard: Yard, given: Parameters) -> Preview:
    found = _selected(yard, given)
    if not found:
        return Preview("There is no such key any more.", count=0)
    items = [
        f"{key_id} {_whose(key.tenant, key.role)}" + (f": {cut(key.name, 100)}" if key.name else "")
        for key_id, key in list(found.items())[:_MOST_SHOWN]
    ]
    text = f"Revoke {counted(len(found), 'key')}. Gateways notice within seconds; running requests"
    text += " go on. It cannot be undone."
    if any(given.actor.name.startswith(key_id) for key_id in found):
        text += " You are logged in with one of them: that ends, too."
    return Preview(text, items=items, count=len(found))


def _revoke(yard: Yard, given: Parameters) -> Outcome:
    found = _selected(yard, given)
    revoked = [key_id for key_id in found if revoke_key(yard, key_id)]
    if not revoked:
        raise ActionRefused("There is no such key any more.")
    named = ", ".join(
        f"{key_id} {_whose(found[key_id].tenant, found[key_id].role)}"
        for key_id in revoked[:_MOST_SHOWN]
    )
    return Outcome(f"{counted(len(revoked), 'key')} revoked.", f"key {named}")


def _selected(yard: Yard, given: Parameters) -> Mapping[str, ApiKey]:
    wanted = given.texts("key")
    if not any(wanted):
        raise BadInput("key: select at least one")
    found = list_keys(yard)
    return {key_id: found[key_id] for key_id in dict.fromkeys(wanted) if key_id in found}


PAGES: Final[tuple[Page, ...]] = (
    Page("/keys", "Keys", "keys.html", _keys, role="admin", menu="Keys"),
)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("key.create", "Create a key", "admin", _preview_create, _create),
    Action("key.revoke", "Revoke keys", "admin", _preview_revoke, _revoke, is_dangerous=True),
)
