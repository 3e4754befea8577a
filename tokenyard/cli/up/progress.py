"""Shows the progress of a yard that starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from tokenyard import clock
from tokenyard.protocol.texts import counted

#: Called with whether a coordinator leads, and the number of ready workers.
OnProgress = Callable[[bool, int], None]


@contextmanager
def spinner(console: Console, workers: int) -> Iterator[OnProgress]:
    """Show the progress of `LocalYard.wait_ready`: a spinner, or to a file one line per step."""
    started = clock.monotonic()
    seen = ""
    with console.status("starting") as status:

        def tell(leads: bool, ready: int) -> None:
            nonlocal seen
            text = _step(leads, ready, workers)
            if console.is_terminal:
                status.update(f"{text} ({clock.monotonic() - started:.0f} s)")
            elif text != seen:
                console.print(text)
            seen = text

        yield tell


def _step(leads: bool, ready: int, workers: int) -> str:
    if not leads:
        return "Waiting for the coordinator to lead"
    return f"{ready} of {counted(workers, 'worker')} {'is' if workers == 1 else 'are'} ready"
