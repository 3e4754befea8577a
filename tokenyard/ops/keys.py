"""The keys of the gateway and the board, and what can be done with them: create and revoke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, cast

import msgspec

from tokenyard import clock
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.ops.tenants import setting_fault
from tokenyard.protocol.api_keys import (
    ID_DIGITS,
    PREFIX,
    ApiKey,
    Role,
    decode_key,
    encode_key,
    key_digest,
    new_key,
)
from tokenyard.protocol.errors import BadInput, Refused
from tokenyard.protocol.keys import PriorityClass, Yard, is_tenant
from tokenyard.protocol.streams import readable
from tokenyard.protocol.tenants import TENANT_RULE
from tokenyard.protocol.texts import counted, cut, printable
from tokenyard.protocol.wire import MAX_STREAM_INTERVAL_MS
from tokenyard.yard.tenants import restriction

#: Most characters of a key's name.
MAX_NAME: Final = 200


def list_keys(yard: Yard) -> dict[str, ApiKey]:
    """All keys by id, the oldest first; entries that are no keys are left out."""
    stored: Any = yard.connection.hgetall(yard.keys.api_keys)
    found = {digest[:ID_DIGITS]: key for digest, key in readable(stored, decode_key)}
    return dict(sorted(found.items(), key=lambda one: one[1].created_ms))


def create_key(yard: Yard, wanted: ApiKey) -> tuple[str, str]:
    """Create a key; returns it and its id. Redis keeps only its digest.

    Raises `BadInput` for a tenant that cannot be one, and for a key that would open nothing.
    """
    if not wanted.tenant and wanted.role is None:
        raise BadInput(
            "tenant: give a tenant, a role, or both: else the key opens nothing", "tenant"
        )
    if wanted.tenant and not is_tenant(wanted.tenant):
        raise BadInput(f"tenant: {wanted.tenant!r}: {TENANT_RULE}", "tenant")
    for label in ("models", "classes"):
        if getattr(wanted, label) == []:
            raise BadInput(f"{label}: name one or more, or leave it out to allow all", label)
    key = new_key()
    digest = key_digest(key)
    stored = msgspec.structs.replace(wanted, created_ms=clock.wall_ms())
    yard.connection.hset(yard.keys.api_keys, digest, encode_key(stored))
    return key, digest[:ID_DIGITS]


def revoke_key(yard: Yard, key_id: str) -> bool:
    """Revoke a key by its id, or by itself; gateways notice within seconds."""
    wanted = key_digest(key_id) if key_id.startswith(PREFIX) else key_id
    if len(wanted) < ID_DIGITS:
        return False
    stored: Any = yard.connection.hkeys(yard.keys.api_keys)
    digests = [digest for digest in stored if digest.startswith(wanted.encode())]
    return bool(digests) and bool(yard.connection.hdel(yard.keys.api_keys, *digests))


_MOST_SHOWN: Final = 20
_MOST_MODELS: Final = 100

Tenant = Annotated[str, Field("Tenant", "Whose key it is; without one it opens no gateway.")]
BoardRole = Annotated[Role | None, Field("Role at the board", "Without one it opens no board.")]
Name = Annotated[str, Field("Name", "What it is for.")]
Models = Annotated[
    list[str] | None, Field("Models that it may use", "With commas; without any: all.")
]
Classes = Annotated[
    list[str] | None,
    Field("Priority classes that it may use", "high, normal, low; without any: all."),
]
StreamInterval = Annotated[
    int,
    Field(
        "Least ms between events of a stream",
        "0: as its tenant is set.",
        least=0,
        most=MAX_STREAM_INTERVAL_MS,
    ),
]
ChosenKeys = Annotated[tuple[str, ...], Field(noun="key", is_secret=True)]


def whose(tenant: str, role: str | None) -> str:
    """``of research, with the role operator``."""
    parts = [f"of {printable(tenant)}"] if tenant else []
    return ", ".join([*parts, f"with the role {role}"] if role else parts)


def _preview_create(yard: Yard, caller: Caller, **given: object) -> Preview:
    del yard, caller, given
    return Preview(
        "A key opens the gateway for a tenant, the board with a role, or both. It is shown once."
    )


@operation("key.create", "Create a key", _preview_create, role="admin")
def create(
    yard: Yard,
    _caller: Caller,
    *,
    tenant: Tenant = "",
    role: BoardRole = None,
    name: Name = "",
    models: Models = None,
    classes: Classes = None,
    stream_interval_ms: StreamInterval = 0,
) -> Outcome:
    """Create a key and print it. It cannot be shown again."""
    if len(name) > MAX_NAME:
        raise BadInput(f"name: give {MAX_NAME} characters at most", "name")
    if len(models or ()) > _MOST_MODELS:
        raise BadInput(f"models: give {_MOST_MODELS} at most", "models")
    allowed = _restriction(classes)
    if allowed and (fault := setting_fault("classes", allowed)):
        raise BadInput(fault, "classes")
    wanted = ApiKey(
        tenant=tenant,
        role=role,
        name=name,
        models=_restriction(models),
        classes=cast("list[PriorityClass] | None", allowed),
        stream_interval_ms=stream_interval_ms,
    )
    key, key_id = create_key(yard, wanted)
    text = f"Key {key_id} {whose(tenant, role)} created"
    fields = {"id": key_id, "key": key, "tenant": tenant, "role": role}
    return Outcome(text, f"key {key_id} {whose(tenant, role)}", secret=key, fields=fields)


def _restriction(words: list[str] | None) -> list[str] | None:
    """An empty list stays one: such a key would open nothing, which is refused."""
    return restriction(words) if words else words


def _preview_revoke(yard: Yard, caller: Caller, *, key: Sequence[str]) -> Preview:
    found = _selected(yard, key)
    if not found:
        return Preview("There is no such key any more.", count=0)
    items = [
        f"{key_id} {whose(one.tenant, one.role)}" + (f": {cut(one.name, 100)}" if one.name else "")
        for key_id, one in list(found.items())[:_MOST_SHOWN]
    ]
    text = f"Revoke {counted(len(found), 'key')}. Gateways notice within seconds; running requests"
    text += " go on. It cannot be undone."
    if any(caller.name.startswith(key_id) for key_id in found):
        text += " You are logged in with one of them: that ends, too."
    return Preview(text, items, len(found))


@operation("key.revoke", "Revoke keys", _preview_revoke, role="admin", is_dangerous=True)
def revoke(yard: Yard, _caller: Caller, *, key: ChosenKeys) -> Outcome:
    """Revoke keys by their ids (see `keys list`) or by themselves. Running requests go on."""
    found = _selected(yard, key)
    revoked = [key_id for key_id in found if revoke_key(yard, key_id)]
    if not revoked:
        raise Refused("there is no such key any more; see `tokenyard keys list`")
    named = ", ".join(
        f"{key_id} {whose(found[key_id].tenant, found[key_id].role)}"
        for key_id in revoked[:_MOST_SHOWN]
    )
    text = f"{counted(len(revoked), 'key')} revoked; gateways and boards notice within seconds"
    return Outcome(text, f"key {named}", fields={"revoked": revoked})


def _selected(yard: Yard, keys: Sequence[str]) -> Mapping[str, ApiKey]:
    known = list_keys(yard)
    wanted = (key_digest(key)[:ID_DIGITS] if key.startswith(PREFIX) else key for key in keys)
    return {key_id: known[key_id] for key_id in dict.fromkeys(wanted) if key_id in known}


OPERATIONS: Final[tuple[Operation, ...]] = (create, revoke)
