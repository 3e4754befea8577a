"""A thread that looks after a job while answers come, or while none comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from tokenyard.batch.outputs import FLUSH_EVERY_S
from tokenyard.protocol.errors import TransientError

LOOK_EVERY_S: Final = 1.0

_log = logging.getLogger("tokenyard.batch")


class Watch:
    """Flushes often and looks about once a second, until it is left.

    A fault ends it; `check` raises that where the job's own thread can deal with it.
    """

    def __init__(self, flush: Callable[[], None], look: Callable[[], None]) -> None:
        self._flush = flush
        self._look = look
        self._stop = threading.Event()
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="batch-watch", daemon=True)
        #: Called after a fault, to wake the job's own thread.
        self.on_fault: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise the fault that ended it."""
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        looked_at = time.monotonic()
        try:
            while not self._stop.wait(FLUSH_EVERY_S):
                self._flush()
                if time.monotonic() - looked_at >= LOOK_EVERY_S:
                    looked_at = time.monotonic()
                    self._look_safely()
        except Exception as fault:  # noqa: BLE001 - it is raised again by `check`
            self._fault = fault
            self.on_fault()

    def _look_safely(self) -> None:
        """The broker may be away for a while; the job's own thread waits for it, too."""
        try:
            self._look()
        except TransientError as fault:
            _log.warning("the batch job cannot be looked after: %s", fault)
