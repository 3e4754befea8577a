"""What becomes of a program one of whose threads fails."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger("tokenyard.process")


def end_with_threads() -> None:
    """End this process, with the reason, when an error nobody foresaw ends one of its threads.

    Its threads read, publish and renew leases: without one of them it would run and do no work.
    """
    threading.excepthook = _end_process


def _end_process(error: threading.ExceptHookArgs) -> None:
    log.critical("%s ends the process", error.thread, exc_info=error.exc_value)
    os._exit(1)
