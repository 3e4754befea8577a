"""Chooses how many tokens of a stream go out at a time.

Mostly one. But with hundreds of streams a step on a GPU takes less time than Python needs for
hundreds of single tokens. There vLLM holds a few tokens of each stream back and returns them
together.
"""

from __future__ import annotations

import math
from typing import Final

#: With fewer running requests each token goes out immediately.
FEW: Final = 32
#: Approximate time between pieces, in seconds; readers cannot tell it from single tokens.
PIECE_S: Final = 0.03
#: Most tokens of a piece; after a crash another process computes a lost piece again.
MOST: Final = 4
#: The shortest recent step counts, because prompts make steps longer; it rises by this factor.
_RISE: Final = 1.1


class PieceSize:
    """Chooses the size of a new stream's pieces by the number of requests and the time of steps."""

    def __init__(self, least: int) -> None:
        """``least`` is the operator's setting (vLLM's ``stream_interval``)."""
        self.least = least
        self._step_s = math.inf
        self._ended: float | None = None  # end of the last step, in seconds

    def note(self, running: int, now: float) -> None:
        """Record the end, at ``now`` seconds, of a step with ``running`` requests."""
        if running < FEW:
            self._ended = None
            return
        if self._ended is not None:
            self._step_s = min(now - self._ended, self._step_s * _RISE)
        self._ended = now

    def choose(self, running: int) -> int:
        """The number of tokens per piece for a new stream beside ``running`` requests."""
        if running < FEW:
            return self.least
        fitting = int(min(MOST, PIECE_S / max(self._step_s, PIECE_S / MOST)))
        return max(self.least, fitting)
