"""What a policy may need to know of a request beside its model; computed only where it does."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from tokenyard.protocol.wire import PLAIN_CHAT, Request, chat_fields, prompt_value

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


def work_only(request: Request) -> RoutingFeatures:
    """The work of a request."""
    return RoutingFeatures(request.work)


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
    data = fields.get(b"prompt") or fields.get(b"messages")
    if data is None:  # it is a common field
        value = prompt_value(request)
        data = value.encode() if isinstance(value, str) else value
    return data
