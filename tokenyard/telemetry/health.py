"""Whether a program is live and ready, for the probes of a container platform.

The endpoint serves it at ``/livez`` and ``/readyz``, Kubernetes' own names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tokenyard import clock

_STARTING: Final = "it is starting"
_STOPPING: Final = "it is stopping"


class Health:
    """Reported by the main loop of a program, read by other threads.

    A loop without an iteration for ``timeout_s`` hangs, so the program should be restarted. A
    program that runs but cannot do its job (no broker, no model yet) is live and not ready: a
    restart would not help.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turned_at: float | None = None
        self._unready = _STARTING
        self._is_stopping = False
        self._watched: tuple[Callable[[], str], ...] = ()

    def watch(self, *faults: Callable[[], str]) -> None:
        """Ask background tasks, too: each says why it is gone, or ""."""
        self._watched = faults

    def turned(self, unready: str = "") -> None:
        """Note an iteration; ``unready`` is why the program cannot do its job now."""
        self._unready = unready
        self._turned_at = clock.monotonic()

    def stopping(self) -> None:
        """Note that the loop has ended in order, and that the rest may take its time."""
        self._is_stopping = True

    @property
    def lost(self) -> str:
        """Why a background task is gone; empty while all go on."""
        return next(filter(None, (fault() for fault in self._watched)), "")

    @property
    def not_live(self) -> str:
        """Why the program should be restarted; empty while it is live."""
        if self._is_stopping:
            return ""
        if self._turned_at is None:
            return _STARTING
        if lost := self.lost:
            return lost
        silent_s = clock.monotonic() - self._turned_at
        return f"no progress for {silent_s:.0f} s" if silent_s > self._timeout_s else ""

    @property
    def not_ready(self) -> str:
        """Why the program cannot do its job now; empty where it can."""
        return _STOPPING if self._is_stopping else self.not_live or self._unready
