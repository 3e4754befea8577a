"""How many tokens of a stream go out at a time.

One, mostly. A GPU makes a step of hundreds of streams sooner than Python hands over hundreds of
single tokens, so there vLLM keeps a few tokens of each stream back and hands them over together.
"""

from __future__ import annotations

import math
from typing import Final

#: With fewer requests under way each token goes out at once.
FEW: Final = 32
#: So often pieces come, about; a reader does not tell them from single tokens.
PIECE_S: Final = 0.03
#: The most tokens of a piece: those that a process which dies takes with it are computed again.
MOST: Final = 4
#: The shortest step of late counts, since a prompt makes a step long; it is forgotten bit by bit.
_RISE: Final = 1.1


class PieceSize:
    """Chosen when a stream begins, by how fast the engine steps with as many as run then."""

    def __init__(self, least: int) -> None:
        """``least`` is what the operator has set (vLLM's ``stream_interval``)."""
        self.least = least
        self._step_s = math.inf
        self._ended: float | None = None  # the step before

    def note(self, running: int, now: float) -> None:
        """A step of so many requests has ended."""
        if running < FEW:
            self._ended = None
            return
        if self._ended is not None:
            self._step_s = min(now - self._ended, self._step_s * _RISE)
        self._ended = now

    def choose(self, running: int) -> int:
        """For a stream that begins beside so many requests."""
        if running < FEW:
            return self.least
        fitting = int(min(MOST, PIECE_S / max(self._step_s, PIECE_S / MOST)))
        return max(self.least, fitting)
