"""Keys of the gateway and the board."""

from __future__ import annotations

from typing import Any

from tokenyard.ops import keys
from tokenyard.protocol.api_keys import ApiKey
from tokenyard.protocol.keys import Yard


def create_key(yard: Yard, tenant: str = "", **settings: Any) -> tuple[str, str]:
    """A new key with these settings, and its id."""
    return keys.create_key(yard, ApiKey(tenant=tenant, **settings))
