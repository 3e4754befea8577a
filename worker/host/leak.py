"""Whether a process keeps memory of the models that it has held: judged over several unloads.

One look tells little. The first models leave caches behind, the heap keeps fragments, and both
stop growing: a process whose memory has reached its plateau is as good as a new one. So what
counts is growth that does not end. Only a model that stays as a whole shows at once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final

#: So many unloads, one after the other, are looked at together.
READINGS: Final = 6
#: In each of its two halves, which overlap, the memory must grow.
_HALF: Final = 4
#: A model has stayed where so much of what it took is still there, and so many floors of it.
_STAYED: Final = 0.5
_STAYED_FLOORS: Final = 8
#: However slowly it came to that: so much of the warm memory in all, and so many floors.
_MOST: Final = 1.0
_MOST_FLOORS: Final = 16
_MIB: Final = 1024**2


class Verdict(enum.Enum):
    """What is to be done with a process."""

    SOUND = "sound"
    GROWING = "growing"  # replace it once nobody needs it
    GROSS = "gross"  # replace it before its next model


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The scarce memory of a process after an unload, in bytes."""

    after: int
    #: What the model had taken; 0: not known.
    took: int = 0


@dataclass(frozen=True, slots=True)
class LeakRule:
    """What may stay behind."""

    tolerance: float = 0.02  # growth within `READINGS` unloads, as a part of the warm memory,
    floor_mib: float = 64.0  # and at least so much, since a baseline may be tiny

    def judge(self, warm: int, looks: Sequence[MemoryReading]) -> Verdict:
        """The verdict on a process with ``warm`` bytes before its first model; newest look last."""
        if self._has_stayed(warm, looks):
            return Verdict.GROSS
        floor = self.floor_mib * _MIB
        is_growing = growth(looks) > max(self.tolerance * warm, floor)
        is_large = kept(warm, looks) > max(_MOST * warm, _MOST_FLOORS * floor)
        return Verdict.GROWING if is_growing or is_large else Verdict.SOUND

    def _has_stayed(self, warm: int, looks: Sequence[MemoryReading]) -> bool:
        """Whether the model that went last is still there, for the most part."""
        if not looks:
            return False
        before = looks[-2].after if len(looks) > 1 else warm
        kept, took = looks[-1].after - before, looks[-1].took
        return took > 0 and kept >= max(_STAYED * took, _STAYED_FLOORS * self.floor_mib * _MIB)


def kept(warm: int, looks: Sequence[MemoryReading]) -> int:
    """The least that has stayed behind in the last `READINGS` unloads, in bytes; else 0."""
    return min(one.after for one in list(looks)[-READINGS:]) - warm if len(looks) >= READINGS else 0


def growth(looks: Sequence[MemoryReading]) -> float:
    """Bytes by which the memory has grown in the last `READINGS` unloads, all the time; else 0.

    The slope is the median of those between any two looks (Theil and Sen), so that single ones do
    not count, and the smaller one of both halves, so that what has come to rest does not.
    """
    if len(looks) < READINGS:
        return 0.0
    newest = [one.after for one in list(looks)[-READINGS:]]
    slope = min(_slope(newest[:_HALF]), _slope(newest[-_HALF:]))
    return max(0.0, slope * (READINGS - 1))


def _slope(values: Sequence[int]) -> float:
    pairs = combinations(enumerate(values), 2)
    return median((later - sooner) / (at - before) for (before, sooner), (at, later) in pairs)
