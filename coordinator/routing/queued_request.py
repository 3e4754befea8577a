"""A request that waits for a lane, as light as possible: a yard may hold very many."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from coordinator.routing.features import NO_FEATURES, RoutingFeatures, prompt_bytes
from tokenyard.protocol.wire import (
    BYTES_PER_TOKEN,
    DEFAULT_CLIENT,
    DEFAULT_RESULT_TTL_S,
    PLAIN_CHAT,
    Request,
    chat_fields,
)

#: The trace of a request that carries none; one object for all of them.
NO_TRACE: Final[Mapping[str, str]] = MappingProxyType({})


class QueuedRequest(Struct, frozen=True, kw_only=True, gc=False):
    """A valid request that waits for a lane: what it takes to place it or to answer it.

    `dispatch` moves the rest inside Redis. ``gc=False``: nothing here can be part of a cycle, and
    a hundred thousand of them would cost each full collection a tenth of a second.
    """

    intake: str  # see `tokenyard.protocol.keys.intake_name`
    entry: str
    id: str
    client: str = DEFAULT_CLIENT
    reply_to: str = ""
    result_ttl_s: int = DEFAULT_RESULT_TTL_S
    deadline_ms: int | None = None  # unix time
    is_shifted: bool = False  # the broker's clock was set since: its entry has another deadline
    model: str = ""  # the base model that serves it; "" while the yard knows none
    tokens: int = 0  # of its prompt, see `prompt_tokens`
    since_ms: float = 0.0  # unix time at which it came in
    not_before_ms: int = 0  # unix time until which it is in back-off; 0: it is not
    trial: int | None = None  # see `History.trial_size`; only a retry can be a suspect
    published: bytes = b""  # packed tokens that its readers have seen
    trace: Mapping[str, str] = NO_TRACE  # its trace context, where tracing is on
    features: RoutingFeatures = NO_FEATURES  # what the policy needs to know of it
    digest: str = ""  # see `tokenyard.protocol.digest`; a retry needs none
    tenant: str = ""
    max_output: int = 0  # most tokens that may be generated

    @property
    def is_stray(self) -> bool:
        """Whether it waits in a common intake, although it has a tenant."""
        return bool(self.tenant) and ":" not in self.intake and self.intake != "retry"

    @property
    def is_suspect(self) -> bool:
        """Whether it may have killed a worker."""
        return self.trial is not None

    @property
    def request(self) -> Request:
        """The request without its payload: enough for a refusal."""
        return Request(
            id=self.id,
            client=self.client,
            reply_to=self.reply_to,
            result_ttl_s=self.result_ttl_s,
            deadline_ms=self.deadline_ms,
        )


def prompt_tokens(request: Request, fields: Mapping[bytes, bytes]) -> int:
    """Tokens of a prompt; estimated from its bytes where it is text or messages.

    Those of messages are with what else their template is given, as scripts count it.
    """
    if request.tokens is not None:
        return len(request.tokens) // 4
    size = len(prompt_bytes(request, fields))
    if request.chat is not PLAIN_CHAT:
        given = chat_fields(request.chat).values()
        size += sum(len(value) for value in given if isinstance(value, bytes))
    return -(-size // BYTES_PER_TOKEN)
