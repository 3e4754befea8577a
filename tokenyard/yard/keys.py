"""The keys of the gateway and the board."""

from __future__ import annotations

from typing import Any

from tokenyard.protocol.api_keys import ID_DIGITS, ApiKey, decode_key
from tokenyard.protocol.streams import readable
from tokenyard.protocol.yard import Yard


def list_keys(yard: Yard) -> dict[str, ApiKey]:
    """All keys by id, the oldest first; entries that are no keys are left out."""
    stored: Any = yard.connection.hgetall(yard.keys.api_keys)
    found = {digest[:ID_DIGITS]: key for digest, key in readable(stored, decode_key)}
    return dict(sorted(found.items(), key=lambda one: one[1].created_ms))
