"""Named places where a process kills itself, so that tests can prove what a crash leaves behind."""

from __future__ import annotations

import os
import signal
from typing import Final

CRASH_POINTS: Final = frozenset({"before_step", "mid_stream", "before_finish"})


class CrashPoint:
    """Kills its process with SIGKILL at the n-th time that a place is passed.

    Written ``<place>`` or ``<place>:<n>``; an empty text never kills. Places of the simulated
    engine are ``before_step``, ``mid_stream`` (a delta was made and not handed over) and
    ``before_finish`` (an answer was made and not handed over).
    """

    def __init__(self, text: str) -> None:
        """Raises `ValueError` where the place is unknown or n is no positive number."""
        place, _, times = text.partition(":")
        if place and place not in CRASH_POINTS:
            raise ValueError(f"unknown crash point {place!r}; known: {sorted(CRASH_POINTS)}")
        self._place = place
        self._left = int(times or 1)
        if self._left < 1:
            raise ValueError(f"crash point {text!r}: count from 1")

    def passed(self, place: str) -> None:
        """Say that the process is at this place; does not return where it must die."""
        if place != self._place:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
