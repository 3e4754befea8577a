"""Keys of the HTTP gateway: what Redis keeps of one, which is never the key itself."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final, Literal

import msgspec
from msgspec import Struct

from tokenyard.protocol.keys import PriorityClass

#: What every key begins with, so that scanners for leaked secrets can find it.
PREFIX: Final = "ty-"
#: The first digits of a key's digest, by which people name it.
ID_DIGITS: Final = 12

#: What a key may do at the board; each may also do what those before it may.
Role = Literal["viewer", "operator", "admin"]


class ApiKey(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key of a tenant, of an operator, or both.

    ``models`` and ``classes`` are what it may use; None: everything. ``stream_interval_ms`` 0 is
    its tenant's. A key without a tenant opens the board only: gateways of before roles cannot
    decode it, and refuse it.
    """

    tenant: str = ""
    name: str = ""  # for people
    models: list[str] | None = None
    classes: list[PriorityClass] | None = None
    created_ms: int = 0  # unix time
    role: Role | None = None  # at the board; None: it opens no board
    stream_interval_ms: int = 0


def new_key() -> str:
    """A key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> str:
    """The field under which Redis has a key: SHA-256, in hex.

    A slow hash would add nothing: nobody can try 2 to the 256 keys.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def encode_key(key: ApiKey) -> bytes:
    """As JSON."""
    return msgspec.json.encode(key)


#: Inverse of `encode_key`; raises `msgspec.DecodeError`.
decode_key: Final = msgspec.json.Decoder(ApiKey).decode
