"""Signals for commands that must stop other processes before they end."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Final, Self

from tokenyard.process.interrupted import Interrupted

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
