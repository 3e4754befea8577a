"""Create, list and revoke keys of the HTTP gateway and the board."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tokenyard import clock
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
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import PriorityClass, is_tenant
from tokenyard.protocol.tenants import TENANT_RULE
from tokenyard.protocol.yard import Yard

#: Most characters of a key's name.
MAX_NAME: Final = 200


def create_key(
    yard: Yard,
    tenant: str = "",
    *,
    role: Role | None = None,
    name: str = "",
    models: list[str] | None = None,
    classes: list[PriorityClass] | None = None,
) -> tuple[str, str]:
    """Create a key; returns it and its id. Redis keeps only its digest.

    Raises `InvalidRequest` for a tenant that cannot be one, and for a key that would open nothing.
    """
    if not tenant and role is None:
        raise InvalidRequest("tenant", "a key needs a tenant, a role for the board, or both")
    if tenant and not is_tenant(tenant):
        raise InvalidRequest("tenant", f"{tenant!r}: {TENANT_RULE}")
    for label, allowed in (("models", models), ("classes", classes)):
        if allowed == []:
            raise InvalidRequest(label, "name one or more, or leave it out to allow all")
    key = new_key()
    digest = key_digest(key)
    stored = ApiKey(
        tenant=tenant,
        name=name,
        models=models,
        classes=classes,
        created_ms=clock.wall_ms(),
        role=role,
    )
    yard.connection.hset(yard.keys.api_keys, digest, encode_key(stored))
    return key, digest[:ID_DIGITS]


def list_keys(yard: Yard) -> dict[str, ApiKey]:
    """All keys by id, the oldest first; entries that are no keys are left out."""
    stored: Any = yard.connection.hgetall(yard.keys.api_keys)
    found = {}
    for digest, packed in stored.items():
        try:
            found[digest.decode()[:ID_DIGITS]] = decode_key(packed)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return dict(sorted(found.items(), key=lambda one: one[1].created_ms))


def revoke_key(yard: Yard, key_id: str) -> bool:
    """Revoke a key by its id, or by itself; gateways notice within seconds."""
    wanted = key_digest(key_id) if key_id.startswith(PREFIX) else key_id
    if len(wanted) < ID_DIGITS:
        return False
    stored: Any = yard.connection.hkeys(yard.keys.api_keys)
    digests = [digest for digest in stored if digest.startswith(wanted.encode())]
    return bool(digests) and bool(yard.connection.hdel(yard.keys.api_keys, *digests))
