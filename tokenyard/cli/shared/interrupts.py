"""Ctrl-C and its relatives, for commands that must stop other processes before they end."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

from tokenyard.process.interrupted import Interrupted

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The first signal raises `Interrupted`; after `hold`, signals are only counted."""

    def __init__(self) -> None:
        self._heard = 0
        self._is_holding = False
        self._has_raised = False
        self._before: list[Any] = []

    def hold(self) -> None:
        """Raise no more: things are being stopped, in order."""
        self._is_holding = True

    @property
    def is_hurried(self) -> bool:
        """Whether somebody does not want to wait: a signal came beside the one that was raised."""
        return self._heard > self._has_raised

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._heard += 1
        if not self._is_holding and self._heard == 1:
            self._has_raised = True
            raise Interrupted(number)

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._hear) for number in _SIGNALS]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)
