"""A request that waits for a lane, as light as possible, with what a policy needs to know of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from tokenyard.protocol.wire import (
    BYTES_PER_TOKEN,
    DEFAULT_CLIENT,
    DEFAULT_RESULT_TTL_S,
    PLAIN_CHAT,
    Request,
    chat_fields,
    prompt_value,
)

#: Bytes of prompt in a block: 16 packed tokens, the default block of vLLM's prefix cache; of text
#: about as many tokens.
BLOCK_BYTES: Final = 64
#: No more of a prompt is used: 4,096 tokens distinguish prefixes well enough.
MOST_BLOCKS: Final = 256


class RoutingFeatures(Struct, frozen=True, gc=False):
    """What a policy needs; light, since very many requests may wait."""

    work: int = 0  # tokens, see `Request.work`
    packed: bytes = b""  # `block_hashes`, eight bytes each
    session: int = 0  # hash of its session; 0: it has none

    @property
    def blocks(self) -> Sequence[int]:
        """Hashes of the blocks of its prompt."""
        return memoryview(self.packed).cast("q") if self.packed else ()


NO_FEATURES: Final = RoutingFeatures()


def all_features(request: Request, fields: Mapping[bytes, bytes]) -> RoutingFeatures:
    """The work of a request, the blocks of its prompt, and its session."""
    session = 0
    if request.session:
        session = hash((request.client, request.session, request.model)) or 1
    return RoutingFeatures(request.work, block_hashes(request, fields).tobytes(), session)


def block_hashes(request: Request, fields: Mapping[bytes, bytes]) -> array[int]:
    """A hash for each whole block of a prompt, which includes all blocks before it.

    They differ between processes (``PYTHONHASHSEED``) and are never stored. Adapters have their own
    prefixes, hence the model's name; so have tenants, requests with a salt of their own, and chats
    with different tools or documents, which a chat template writes first.
    """
    data = prompt_bytes(request, fields)
    end = min(len(data) // BLOCK_BYTES, MOST_BLOCKS) * BLOCK_BYTES
    hashes, before = array("q"), hash(request.model)
    if request.chat is not PLAIN_CHAT and (chat := chat_fields(request.chat)):
        before = hash((before, *chat.items()))
    if salt := request.prefix_salt:
        before = hash((before, salt))
    for at in range(0, end, BLOCK_BYTES):
        before = hash((before, data[at : at + BLOCK_BYTES]))
        hashes.append(before)
    return hashes


def prompt_bytes(request: Request, fields: Mapping[bytes, bytes]) -> bytes:
    """The prompt of a request, as in its entry where it has a field of its own."""
    if request.tokens is not None:
        return request.tokens
    data = fields.get(b"prompt") or fields.get(b"messages") or fields.get(b"inputs")
    if data is None:  # it is a common field
        value = prompt_value(request)
        data = value.encode() if isinstance(value, str) else value
    return data


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
    turn: str = ""  # who has a turn with it: its client, unless only the order of arrival counts
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
