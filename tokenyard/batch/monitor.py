"""A thread that flushes and checks a job while its own thread waits for answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from tokenyard import clock
from tokenyard.batch.outputs import FLUSH_EVERY_S
from tokenyard.protocol.errors import TransientError

CHECK_EVERY_S: Final = 1.0

_log = logging.getLogger("tokenyard.batch")


class JobMonitor:
    """Flushes often and checks about once a second, until the context ends.

    An error ends it; `check` raises the error in the job's own thread.
    """

    def __init__(self, flush: Callable[[], None], check: Callable[[], None]) -> None:
        self._flush = flush
        self._check = check
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="batch-monitor", daemon=True)
        #: Called after an error, to wake the job's own thread.
        self.on_error: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise the error that ended it."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        checked_at = clock.monotonic()
        try:
            while not clock.wait(self._stop, FLUSH_EVERY_S):
                self._flush()
                if clock.monotonic() - checked_at >= CHECK_EVERY_S:
                    checked_at = clock.monotonic()
                    self._check_safely()
        except Exception as error:  # noqa: BLE001 - it is raised again by `check`
            self._error = error
            self.on_error()

    def _check_safely(self) -> None:
        """The broker may be unreachable for a while; the job's own thread waits for it as well."""
        try:
            self._check()
        except TransientError as error:
            _log.warning("the batch job cannot be checked: %s", error)
