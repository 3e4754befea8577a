"""Bounded waits for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(check: Callable[[], T], *, timeout_s: float = 60.0, every_s: float = 0.01) -> T:
    """The first true value of ``check``, which is called repeatedly for ``timeout_s``.

    A check may also raise `AssertionError` for "not yet"; the test fails with the last one.
    Any other exception ends the wait immediately.
    """
    until = time.monotonic() + timeout_s
    last: AssertionError | None = None
    while True:
        try:
            if value := check():
                return value
        except AssertionError as not_yet:
            last = not_yet
        if time.monotonic() >= until:
            raise AssertionError(f"not within {timeout_s:g} s: {last or 'it stayed false'}")
        time.sleep(every_s)
