"""Named places where a process kills itself, so that tests can prove what a crash leaves behind."""

from __future__ import annotations

import os
import signal
from typing import Final

from tokenyard.protocol.wire import pack_tokens

#: Places, and how the process ends there: as if killed from outside, or by a fault of its own.
CRASH_POINTS: Final = {
    **dict.fromkeys(("before_step", "mid_stream", "before_finish"), signal.SIGKILL),
    **dict.fromkeys(("warming", "loading", "attached", "unloading"), signal.SIGKILL),
    **dict.fromkeys(("asleep", "waking"), signal.SIGKILL),
    "illegal": signal.SIGILL,
    "poison": signal.SIGSEGV,
    "stall": signal.SIGSTOP,
}
#: Not a place to die: the engine fails to serve some requests.
FAULT: Final = "fault"
#: Prompts that begin so are poison, or cannot be served, where the crash point says so.
POISON: Final = (31_313, 13, 31_313)
FAULTY: Final = (31_414, 14, 31_414)


class CrashPoint:
    """Kills its process at the n-th time that a place is passed.

    Written ``<place>`` or ``<place>:<n>``; an empty text never kills. Places of the simulated
    engine are ``before_step``, ``mid_stream`` (a delta was made and not handed over),
    ``before_finish`` (an answer was made and not handed over); in the life of its process
    ``warming``, ``loading``, ``attached`` (to the leader of a group), ``asleep`` (and nobody has
    been told yet), ``waking``, ``unloading``; all by SIGKILL as from outside. And ``poison``: a
    step with a request in the batch whose prompt begins with `POISON`, which ends in a SIGSEGV.
    At ``illegal``, while it warms up, the process ends as on a CPU that lacks an instruction.
    At ``stall``, which is while it warms up, the process stops until somebody lets it go on.
    With ``fault:<n>`` nothing dies: a request whose prompt begins with `FAULTY` fails n times, a
    stream after its first tokens.
    """

    def __init__(self, text: str) -> None:
        """Raises `ValueError` where the place is unknown or n is no positive number."""
        place, _, times = text.partition(":")
        if place and place not in CRASH_POINTS and place != FAULT:
            raise ValueError(f"unknown crash point {place!r}; known: {[*CRASH_POINTS, FAULT]}")
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
            os.kill(os.getpid(), CRASH_POINTS[place])

    def is_poison(self, prompt: bytes) -> bool:
        """Whether this (packed) prompt is to kill the process."""
        return self._place == "poison" and prompt.startswith(pack_tokens(POISON))

    def is_faulty(self, prompt: bytes, faults: int) -> bool:
        """Whether a request that has failed so often is to fail again."""
        is_meant = self._place == FAULT and faults < self._left
        return is_meant and prompt.startswith(pack_tokens(FAULTY))
