"""Showing that a yard is on its way up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from tokenyard.protocol.texts import counted

#: Whether a coordinator leads, and how many workers are ready.
Tell = Callable[[bool, int], None]


@contextmanager
def spinner(console: Console, workers: int) -> Iterator[Tell]:
    """What `LocalYard.wait_ready` tells: a spinner, or in a file one line for each step."""
    started = time.monotonic()
    seen = ""
    with console.status("starting") as status:

        def tell(leads: bool, ready: int) -> None:
            nonlocal seen
            text = _step(leads, ready, workers)
            if console.is_terminal:
                status.update(f"{text} ({time.monotonic() - started:.0f} s)")
            elif text != seen:
                console.print(text)
            seen = text

        yield tell


def _step(leads: bool, ready: int, workers: int) -> str:
    if not leads:
        return "The coordinator is about to lead"
    return f"{ready} of {counted(workers, 'worker')} {'is' if workers == 1 else 'are'} ready"
