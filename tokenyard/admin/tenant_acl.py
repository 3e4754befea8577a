"""The user of the server with which a tenant logs in: a guest, whose inbox names the tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Final

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import Keys, is_tenant
from tokenyard.protocol.receipts import owner_of, owns
from tokenyard.protocol.system_clients import why_no_guest
from tokenyard.protocol.tenants import TENANT_RULE

#: Names of users of `deploy/users.acl`, which no tenant can have.
USERS: Final = (
    *("default", "client", "coordinator", "worker", "admin", "batch", "gateway"),
    *("gateway-batches", "replica", "sentinel"),
)
#: The rights of the user `guest` in `deploy/users.acl`, in a yard and under a name.
_RIGHTS: Final = (
    "resetchannels -@all +@connection -@admin -@dangerous -client|tracking -select +time"
    " (%W~{prefix}inbox:{name} +xadd)"
    " (%R~{prefix}leader +get)"
    " (%R~{prefix}info +hgetall)"
    " (%R~{prefix}request:{name}/* %R~{prefix}request:{name}-*/* +hmget +hgetall)"
    " (%R~{prefix}tokens:{name}/* %R~{prefix}tokens:{name}-*/* +get +strlen)"
    " (%R~{prefix}reply:{name}/* %R~{prefix}reply:{name}-*/*"
    " %R~{prefix}replies:{name} %R~{prefix}replies:{name}-* +xread)"
    " (%W~{prefix}replies:{name} %W~{prefix}replies:{name}-* +xtrim)"
)


def check_guests(guests: Collection[str]) -> None:
    """Raises `InvalidRequest` where one of these tenants cannot be a guest beside the others."""
    for guest in sorted(guests):
        _check_name(guest)
        if other := owner_of(guest, guests):
            raise _are_alike(other, guest)


def acl_line(keys: Keys, tenant: str, password: str, others: Iterable[str] = ()) -> str:
    """The line of an ACL file for a tenant; without a password nobody can log in.

    Without its first word, ``ACL SETUSER`` takes it, too. Raises `InvalidRequest` for a name that
    cannot be one, and if a tenant of ``others`` and this one could read each other's answers.
    """
    if not is_tenant(tenant):
        raise InvalidRequest("tenant", f"{tenant!r}: {TENANT_RULE}")
    _check_name(tenant)
    for other in others:
        if other != tenant and (owns(tenant, other) or owns(other, tenant)):
            raise _are_alike(tenant, other)
    rights = _RIGHTS.format(prefix=f"tokenyard:{{{keys.yard}}}:", name=tenant)
    if not password:
        return f"user {tenant} off {rights}"
    return f"user {tenant} on #{hashlib.sha256(password.encode()).hexdigest()} {rights}"


def _check_name(tenant: str) -> None:
    if tenant in USERS:
        message = f"{tenant!r}: deploy/users.acl has a user of this name"
        raise InvalidRequest("tenant", message)
    if why := why_no_guest(tenant):
        raise InvalidRequest("tenant", f"{tenant!r} cannot be a guest: {why}")


def _are_alike(one: str, other: str) -> InvalidRequest:
    return InvalidRequest(
        "tenant",
        f"{one!r} and {other!r}: one begins with the other and a '-', as the names of the other's"
        " clients do; rename one",
    )
