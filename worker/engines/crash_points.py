"""Named places where a process kills itself, to test recovery from crashes."""

from __future__ import annotations

import os
import signal
from typing import Final

from tokenyard.protocol.wire import pack_tokens

#: Places, and the signal that the process sends itself there.
CRASH_POINTS: Final = {
    **dict.fromkeys(("before_step", "mid_stream", "before_finish"), signal.SIGKILL),
    **dict.fromkeys(("warming", "loading", "attached", "unloading"), signal.SIGKILL),
    **dict.fromkeys(("asleep", "waking"), signal.SIGKILL),
    "illegal": signal.SIGILL,
    "poison": signal.SIGSEGV,
    "stall": signal.SIGSTOP,
}
#: Not a crash: the engine fails to serve some requests.
FAULT: Final = "fault"
#: Beginnings of prompts that crash the process at ``poison``, or fail with ``fault``.
POISON: Final = (31_313, 13, 31_313)
FAULTY: Final = (31_414, 14, 31_414)


class CrashPoint:
    """Kills its process when it passes a place for the n-th time.

    Written ``<place>`` or ``<place>:<n>``; an empty text never kills. These places send SIGKILL:

    - in the simulated engine ``before_step``, ``mid_stream`` (a delta is ready but not returned)
      and ``before_finish`` (an answer is ready but not returned);
    - in the life of its process ``warming``, ``loading``, ``attached`` (to the leader of a group),
      ``asleep`` (not yet reported), ``waking`` and ``unloading``.

    ``poison`` sends SIGSEGV in a step with a request whose prompt begins with `POISON`. During the
    warm-up, ``illegal`` sends SIGILL, as a missing instruction does, and ``stall`` sends SIGSTOP:
    the process stops until a SIGCONT. ``fault:<n>`` kills nothing: a request whose prompt begins
    with `FAULTY` fails n times, a stream after its first tokens.
    """

    def __init__(self, text: str) -> None:
        """Raise `ValueError` if the place is unknown or n is no positive number."""
        place, _, times = text.partition(":")
        if place and place not in CRASH_POINTS and place != FAULT:
            raise ValueError(f"unknown crash point {place!r}; known: {[*CRASH_POINTS, FAULT]}")
        self._place = place
        self._left = int(times or 1)
        if self._left < 1:
            raise ValueError(f"crash point {text!r}: count from 1")

    def kill_if_due(self, place: str) -> None:
        """Mark that the process passes ``place``; kills the process at the n-th pass."""
        if place != self._place:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), CRASH_POINTS[place])

    def is_poison(self, prompt: bytes) -> bool:
        """Whether this packed prompt must kill the process."""
        return self._place == "poison" and prompt.startswith(pack_tokens(POISON))

    def is_faulty(self, prompt: bytes, faults: int) -> bool:
        """Whether a request that has failed ``faults`` times must fail again."""
        is_meant = self._place == FAULT and faults < self._left
        return is_meant and prompt.startswith(pack_tokens(FAULTY))
