"""The simulated engine's prefix cache: cached prefixes of prompts need no prefill.

Like vLLM's, it holds whole blocks, and the hash of a block covers all tokens before it. It evicts
the least recently used block first, and the end of a prompt before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

BLOCK_TOKENS: Final = 16
_TOKEN_BYTES: Final = 4


class PrefixCache:
    """Holds blocks of up to ``tokens`` tokens; with 0 it is off and costs nothing."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._most = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, salt: str, packed: bytes) -> int:
        """The number of leading tokens of a packed prompt that are cached.

        Never all of them: the last token must be computed to get the next one.
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
        """Add packed tokens that the engine has computed, from the first token on."""
        if not self._most:
            return
        for block in reversed(list(_hashes(salt, packed))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()


def _hashes(salt: str, packed: bytes) -> Iterator[int]:
    """A hash for each whole block; ``salt`` separates different adapters."""
    size, before = BLOCK_TOKENS * _TOKEN_BYTES, hash(salt)
    for at in range(0, len(packed) - size + 1, size):
        before = hash((before, packed[at : at + size]))
        yield before
