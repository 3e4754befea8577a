"""Whether a process leaks memory of the models that it has held, judged over several unloads.

A single reading says little: the first models fill caches, the heap fragments, and both stop
growing. A process whose memory has reached a plateau is as good as a new one, so only growth that
does not end counts. A model that stays as a whole shows immediately.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final

from worker.engines import Memory

#: Unloads in a row that are judged together.
READINGS: Final = 6
#: Memory must grow in each of two halves of this length, which overlap.
_HALF: Final = 4
#: A model has stayed if this share of its memory remains, and at least so many floors.
_STAYED: Final = 0.5
_STAYED_FLOORS: Final = 8
#: However slow the growth: this share of the warm memory in all, and at least so many floors.
_MOST: Final = 1.0
_MOST_FLOORS: Final = 16
#: The least growth that counts, since the warm memory may be tiny.
FLOOR_MIB: Final = 64.0
_MIB: Final = 1024**2


class Verdict(enum.Enum):
    """What to do with a process."""

    SOUND = "sound"
    GROWING = "growing"  # replace it when it is idle
    GROSS = "gross"  # replace it before its next model


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The scarce memory of a process after an unload, in bytes."""

    after: int
    #: What the model had taken; 0 if unknown.
    took: int = 0


class MemoryHistory:
    """The memory of one process, from its warm-up on, and whether models stay behind in it."""

    def __init__(self, tolerance: float = 0.02, floor_mib: float = FLOOR_MIB) -> None:
        """``tolerance``: allowed growth in `READINGS` unloads, as a share of the warm memory."""
        self.now: Memory | None = None  # when last measured
        self.baseline: Memory | None = None  # when it was warm for the first time
        self.readings: deque[MemoryReading] = deque(maxlen=READINGS)  # newest last
        self._tolerance = tolerance
        self._floor = floor_mib * _MIB
        self._most = 0  # bytes, with the loaded model

    def note_warm(self, memory: Memory) -> None:
        """No model is loaded, or no longer."""
        self.now = memory
        if self.baseline is None:
            self.baseline = memory
        else:
            before = self.readings[-1].after if self.readings else self.baseline.scarce
            took = max(0, self._most - before)
            self.readings.append(MemoryReading(memory.scarce, took))
        self._most = 0

    def note_loaded(self, memory: Memory) -> None:
        """A model is loaded."""
        self.now = memory
        self._most = max(self._most, memory.scarce)

    @property
    def kept(self) -> int:
        """Bytes beyond the baseline, when last measured."""
        return self.now.scarce - self.baseline.scarce if self.now and self.baseline else 0

    @property
    def verdict(self) -> Verdict:
        """Whether a process that is warm leaks."""
        if self.baseline is None:
            return Verdict.SOUND
        warm = self.baseline.scarce
        if self._has_stayed(warm):
            return Verdict.GROSS
        after = [one.after for one in self.readings]
        if len(after) < READINGS:
            return Verdict.SOUND
        is_growing = growth(after) > max(self._tolerance * warm, self._floor)
        is_large = min(after) - warm > max(_MOST * warm, _MOST_FLOORS * self._floor)
        return Verdict.GROWING if is_growing or is_large else Verdict.SOUND

    def _has_stayed(self, warm: int) -> bool:
        """Whether most of the last model is still there."""
        if not self.readings:
            return False
        before = self.readings[-2].after if len(self.readings) > 1 else warm
        kept, took = self.readings[-1].after - before, self.readings[-1].took
        return took > 0 and kept >= max(_STAYED * took, _STAYED_FLOORS * self._floor)


def growth(values: Sequence[int]) -> float:
    """Steady growth over `READINGS` values.

    The slope is the median of those between any two readings (Theil-Sen), so that outliers do not
    count, and the smaller one of both halves, so that growth that has ended does not.
    """
    slope = min(_slope(values[:_HALF]), _slope(values[-_HALF:]))
    return max(0.0, slope * (READINGS - 1))


def _slope(values: Sequence[int]) -> float:
    pairs = combinations(enumerate(values), 2)
    return median((later - sooner) / (at - before) for (before, sooner), (at, later) in pairs)
