"""Ctrl-C at any moment of a command: no traceback, and the exit status that shells expect."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

#: What a shell adds to the number of the signal that ended a program.
SIGNALLED: Final = 128


class Interrupted(KeyboardInterrupt):
    """A signal was heard; ``status`` is the exit status that stands for it.

    Not `KeyboardInterrupt` itself: when that passes through the `exec` of a string, as dataclasses
    do at import, CPython ends the process by SIGINT in the end, also if it was caught.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.status = SIGNALLED + number


def leave_at_once() -> None:
    """Let Ctrl-C end the process where it stands, while it is imported or about to end anyway."""
    _handle(_leave)


def interrupt() -> None:
    """Let Ctrl-C raise `Interrupted` in the main thread."""
    _handle(_raise)
    # Where an exception cannot go on, as in a `__del__`, Python prints it and forgets it.
    sys.unraisablehook = _lost


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    # A shell lets what it runs in the background ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(SIGNALLED + number)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _lost(lost: sys.UnraisableHookArgs) -> None:
    if isinstance(lost.exc_value, KeyboardInterrupt):
        os._exit(SIGNALLED + signal.SIGINT)
    sys.__unraisablehook__(lost)
