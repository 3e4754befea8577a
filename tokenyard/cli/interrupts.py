"""Ctrl-C and its relatives, for commands that must stop other processes before they end."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal was heard.

    Not `KeyboardInterrupt` itself: when that passes through the `exec` of a string, as dataclasses
    do at import, CPython ends the process by SIGINT in the end, also if it was caught.
    """


class Interrupts:
    """The first signal raises `Interrupted`; after `hold`, signals are only counted."""

    def __init__(self) -> None:
        self._heard = 0
        self._held_at: int | None = None
        self._before: list[Any] = []

    def hold(self) -> None:
        """Raise no more: things are being stopped, in order."""
        self._held_at = self._heard

    @property
    def is_hurried(self) -> bool:
        """Whether a signal came after `hold`: somebody does not want to wait."""
        return self._held_at is not None and self._heard > self._held_at

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._heard += 1
        if self._held_at is None and self._heard == 1:
            raise Interrupted

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
