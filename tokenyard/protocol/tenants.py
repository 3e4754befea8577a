"""What an operator sets for a tenant: its share and its limits, as Redis keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from tokenyard.protocol.keys import MAX_TENANT, PriorityClass, is_tenant

#: What `is_tenant` asks for.
TENANT_RULE: Final = f"use 1 to {MAX_TENANT} of A-Z a-z 0-9 _ . : @ -"

#: A share a thousand times the usual one, or a thousandth of it.
Weight = Annotated[float, Meta(ge=0.001, le=1000.0)]
#: 0 is no limit. Scripts count exactly up to here.
Limit = Annotated[int, Meta(ge=0, le=2**53)]


class TenantSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The share and the limits of a tenant. Limits that are 0 or None do not apply.

    Redis keeps it as JSON without the defaults. New fields come last, with defaults: a reader
    of an earlier release leaves them out.
    """

    weight: Weight = 1.0
    max_waiting_requests: Limit = 0
    max_waiting_tokens: Limit = 0  # of prompts
    max_running_requests: Limit = 0
    tokens_per_minute: Limit = 0  # prompts and answers
    tokens_per_day: Limit = 0
    max_tokens: Limit = 0  # of one request
    models: Annotated[list[str], Meta(min_length=1)] | None = None
    classes: Annotated[list[PriorityClass], Meta(min_length=1)] | None = None


#: The settings that can refuse a request.
LIMITS: Final = tuple(name for name in TenantSettings.__struct_fields__ if name != "weight")
DEFAULTS: Final = TenantSettings()
_decoder = msgspec.json.Decoder(TenantSettings)


def encode_tenant(settings: TenantSettings) -> bytes:
    """As JSON."""
    return msgspec.json.encode(settings)


def decode_tenant(packed: bytes) -> TenantSettings:
    """Inverse of `encode_tenant`; raises `msgspec.MsgspecError`."""
    return _decoder.decode(packed)


def decode_tenants(fields: Mapping[bytes, bytes]) -> dict[str, TenantSettings]:
    """The hash `tenants` by name; those that cannot be read have the `DEFAULTS`."""
    return {name: settings or DEFAULTS for name, settings in decode_each(fields).items()}


def decode_each(fields: Mapping[bytes, bytes]) -> dict[str, TenantSettings | None]:
    """The hash `tenants` by name, in order; None for settings that cannot be read.

    Fields whose name cannot be a tenant's are left out.
    """
    found = {}
    for raw, packed in sorted(fields.items()):
        name = raw.decode(errors="replace")
        if is_tenant(name):
            found[name] = _settings(packed)
    return found


def _settings(packed: bytes) -> TenantSettings | None:
    try:
        return decode_tenant(packed)
    except msgspec.MsgspecError:
        return None
