"""A request that waits for a lane, as light as it can be: a yard may hold very many."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from coordinator.history import FRESH, History
from tokenyard.keys import IntakeClass
from tokenyard.wire import Request, SamplingParams

#: Bytes of text that make a token, about, where nobody has counted.
BYTES_PER_TOKEN = 4

_NO_PARAMS = SamplingParams()
_NO_METADATA: dict[str, Any] = {}  # shared


@dataclass(frozen=True, slots=True)
class Waiting:
    """A valid request that waits for a lane: what it takes to place it or to refuse it."""

    intake: IntakeClass
    entry: str
    request: Request  # `without_payload`
    model: str = ""  # the base model that serves it; "" while the yard knows none
    tokens: int = 0  # of its prompt, see `prompt_tokens`
    since_ms: float = 0.0  # unix time at which it came in
    history: History = FRESH
    is_suspect: bool = False  # must run alone; only a retry can be one
    published: bytes = b""  # packed tokens that its readers have seen


def without_payload(request: Request) -> Request:
    """A request without what only an engine needs, which `dispatch` moves inside Redis."""
    return msgspec.structs.replace(
        request,
        client=sys.intern(request.client),
        model=sys.intern(request.model),
        reply_to=sys.intern(request.reply_to),
        tokens=None,
        prompt=None,
        messages=None,
        params=_NO_PARAMS,
        tenant="",
        session="",
        metadata=_NO_METADATA,
    )


def prompt_tokens(request: Request, fields: Mapping[bytes, bytes]) -> int:
    """Tokens of a prompt; estimated from its bytes where it is text or messages."""
    if request.tokens is not None:
        return len(request.tokens) // 4
    size = len(fields.get(b"prompt", b"")) + len(fields.get(b"messages", b""))
    return -(-size // BYTES_PER_TOKEN)
