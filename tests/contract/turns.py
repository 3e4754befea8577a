"""Turns of a part of a yard, taken in a thread beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

_PAUSE_S = 0.002
_END_S = 30.0


@contextmanager
def taking_turns(turn: Callable[[], object]) -> Iterator[None]:
    """Repeat ``turn`` until the block ends, with a pause after one that had nothing to do.

    Raises what a turn raised.
    """
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            if not turn():
                ends.wait(_PAUSE_S)

    with ThreadPoolExecutor(max_workers=1) as pool:
        turns = pool.submit(run)
        try:
            yield
        finally:
            ends.set()
            turns.result(_END_S)
