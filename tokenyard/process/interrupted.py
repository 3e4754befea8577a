"""Ctrl-C at any moment of a command: no traceback, and the exit status that shells expect."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

#: Added to the number of the signal that ended a program, as shells do.
SIGNALLED: Final = 128


class Interrupted(KeyboardInterrupt):
    """A signal has arrived; ``status`` is the exit status for it.

    Not `KeyboardInterrupt` itself: after that has passed through the `exec` of a string, as in
    dataclasses at import, CPython ends the process by SIGINT, even if it was caught.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.status = SIGNALLED + number


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process immediately, during imports and at its end."""
    _handle(_leave)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise `Interrupted` in the main thread."""
    _handle(_raise)
    # Where an exception cannot propagate, as in a `__del__`, Python prints and drops it.
    sys.unraisablehook = _unraisable


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    # Shells let background programs ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(SIGNALLED + number)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _unraisable(error: sys.UnraisableHookArgs) -> None:
    if isinstance(error.exc_value, KeyboardInterrupt):
        os._exit(SIGNALLED + signal.SIGINT)
    sys.__unraisablehook__(error)


#: Signals for commands that must stop other processes before they end.
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The first signal raises `Interrupted`; after `hold`, signals are only counted."""

    def __init__(self) -> None:
        self._received = 0
        self._is_holding = False
        self._has_raised = False
        self._before: list[Any] = []

    def hold(self) -> None:
        """Stop raising, because processes are being stopped."""
        self._is_holding = True

    @property
    def is_hurried(self) -> bool:
        """Whether a further signal asks not to wait."""
        return self._received > self._has_raised

    def _count(self, number: int, _frame: FrameType | None) -> None:
        self._received += 1
        if not self._is_holding and self._received == 1:
            self._has_raised = True
            raise Interrupted(number)

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._count) for number in _SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)
