"""What a policy may want to know of a request beside its model; worked out only where one asks."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from tokenyard.protocol.wire import PLAIN_CHAT, Request, chat_fields, prompt_value

#: Bytes of prompt that make a block: 16 packed tokens, as many as a block of vLLM's prefix cache
#: has by default. Of text they are about as many tokens.
BLOCK_BYTES: Final = 64
#: No more of a prompt is looked at: 4,096 tokens tell one prefix from another.
MOST_BLOCKS: Final = 256


class RoutingFeatures(Struct, frozen=True, gc=False):
    """What a policy asked for; light, since very many requests may wait."""

    work: int = 0  # tokens, see `Request.work`
    packed: bytes = b""  # `block_hashes`, eight bytes each
    session: int = 0  # hash of its session; 0: it is of none

    @property
    def blocks(self) -> Sequence[int]:
        """Hashes of the blocks of its prompt."""
        return memoryview(self.packed).cast("q") if self.packed else ()


NO_FEATURES: Final = RoutingFeatures()


def weigh(request: Request) -> RoutingFeatures:
    """How much work a request is."""
    return RoutingFeatures(request.work)


def all_features(request: Request, fields: Mapping[bytes, bytes]) -> RoutingFeatures:
    """How much work a request is, how its prompt begins, and of which session it is."""
    session = 0
    if request.session:
        session = hash((request.client, request.session, request.model)) or 1
    return RoutingFeatures(request.work, block_hashes(request, fields).tobytes(), session)


def block_hashes(request: Request, fields: Mapping[bytes, bytes]) -> array[int]:
    """A hash for each whole block of a prompt, each of all that comes before it, too.

    They differ between processes (``PYTHONHASHSEED``) and are never written down. Adapters have
    prefixes of their own, hence the model's name; and so have chats with other tools or documents,
    which a chat template writes first.
    """
    data = prompt_bytes(request, fields)
    end = min(len(data) // BLOCK_BYTES, MOST_BLOCKS) * BLOCK_BYTES
    hashes, before = array("q"), hash(request.model)
    if request.chat is not PLAIN_CHAT and (chat := chat_fields(request.chat)):
        before = hash((before, *chat.items()))
    for at in range(0, end, BLOCK_BYTES):
        before = hash((before, data[at : at + BLOCK_BYTES]))
        hashes.append(before)
    return hashes


def prompt_bytes(request: Request, fields: Mapping[bytes, bytes]) -> bytes:
    """The prompt of a request, as it stands in its entry where it has a field of its own."""
    if request.tokens is not None:
        return request.tokens
    data = fields.get(b"prompt") or fields.get(b"messages")
    if data is None:  # it is shared by many
        value = prompt_value(request)
        data = value.encode() if isinstance(value, str) else value
    return data
