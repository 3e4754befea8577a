"""How fast lines are done, of late."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

_WINDOW_S: Final = 30.0
_SAMPLE_S: Final = 0.5


class Rate:
    """Counts lines; the rate is that of the last half minute."""

    def __init__(self) -> None:
        self._count = 0
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def count(self) -> None:
        """A line is done."""
        self._count += 1

    def per_s(self) -> float:
        """Lines a second."""
        now = time.monotonic()
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, self._count))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        return (self._count - before) / max(now - since, 1e-3)
