"""The interpreter of a service: what it collects, and what becomes of its threads.

Services make many objects for each request and hardly any reference cycles. Python's collector,
which runs after every 700 objects, takes a tenth of their time and finds nothing (measured).
Clients leave it as it is.
"""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")
log = logging.getLogger("tokenyard.process")

#: The collector's thresholds of the three generations.
SELDOM: Final = (50_000, 20, 100)
#: Bytes of a stack for parsers of grammars, which end the process where it is too small: they
#: recurse as deep as the text lets them, over the usual 8 MiB. What is not used takes no memory.
DEEP_STACK: Final = 512 * 1024 * 1024
_starting = threading.Lock()


def collect_seldom() -> None:
    """Collect seldom, and never visit the objects that exist already."""
    gc.freeze()
    gc.set_threshold(*SELDOM)


def end_with_threads() -> None:
    """End this process, with the reason, when an error nobody foresaw ends one of its threads.

    Its threads read, publish and renew leases: without one of them it would run and do no work.
    """
    threading.excepthook = _end_process


def start_deep(thread: threading.Thread) -> None:
    """Start a thread with a deep stack."""
    with _starting:
        usual = threading.stack_size(DEEP_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)


def deepen_main() -> None:
    """Let the main thread's stack grow further: on Linux up to 128 MiB, where mappings begin."""
    now, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = DEEP_STACK if most == resource.RLIM_INFINITY else min(DEEP_STACK, most)
    if now not in (resource.RLIM_INFINITY, wanted):
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))


def run_deep(function: Callable[[], T]) -> Future[T]:
    """Call a function in the caller's context, in a thread of its own with a deep stack."""
    outcome: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(context.run(function))
        except Exception as error:  # noqa: BLE001 - for the caller
            outcome.set_exception(error)

    start_deep(threading.Thread(target=work, name="grammar", daemon=True))
    return outcome


def _end_process(error: threading.ExceptHookArgs) -> None:
    log.critical("%s ends the process", error.thread, exc_info=error.exc_value)
    os._exit(1)
