"""The simulated engine's prefix cache: which beginnings of prompts cost no prefill.

Like vLLM's: whole blocks, each known by all tokens before it, too; the least recently used goes
first, and of one prompt its end before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

BLOCK_TOKENS: Final = 16
_TOKEN_BYTES: Final = 4


class PrefixCache:
    """Remembers the blocks of so many tokens; of none, it costs nothing."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._most = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, salt: str, packed: bytes) -> int:
        """How many tokens of a packed prompt are here, from the first on.

        Never all of them: the last one must be computed to know the next.
        """
        if not self._most:
            return 0
        count = 0
        for block in _hashes(salt, packed[:-_TOKEN_BYTES]):
            if block not in self._blocks:
                break
            count += BLOCK_TOKENS
        return count

    def put(self, salt: str, packed: bytes) -> None:
        """Tokens that the engine has computed, packed, from the first on."""
        if not self._most:
            return
        for block in reversed(list(_hashes(salt, packed))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()


def _hashes(salt: str, packed: bytes) -> Iterator[int]:
    """One for each whole block; ``salt`` tells caches of different adapters apart."""
    size, before = BLOCK_TOKENS * _TOKEN_BYTES, hash(salt)
    for at in range(0, len(packed) - size + 1, size):
        before = hash((before, packed[at : at + size]))
        yield before
