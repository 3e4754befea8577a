"""What `tokenyard up` and `demo` show and announce, and the port that they serve on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from tokenyard import clock
from tokenyard.broker.url import public_url
from tokenyard.cli.up.local_yard import YardFailed
from tokenyard.process.embedded_broker import free_port, listen_error
from tokenyard.process.running import Announcement, default_data_dir, running_up
from tokenyard.protocol.errors import SettingsError
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
            text = "Waiting for the coordinator to lead"
            if leads:
                are = "is" if workers == 1 else "are"
                text = f"{ready} of {counted(workers, 'worker')} {are} ready"
            if console.is_terminal:
                status.update(f"{text} ({clock.monotonic() - started:.0f} s)")
            elif text != seen:
                console.print(text)
            seen = text

        yield tell


# The port of a local yard's gateway, or of its board.

DEFAULT_PORT: Final = 8000


def choose_http_port(wanted: int | None) -> int:
    """The wanted port, or 8000, or a free one; raises `click.UsageError` where it is taken."""
    if wanted is None and not listen_error(DEFAULT_PORT):
        return DEFAULT_PORT
    if wanted and listen_error(wanted):
        raise click.UsageError(f"--http-port: {wanted} is taken; give another one, or 0")
    return wanted or free_port()


# Announces `tokenyard up` to other commands, and locks its data folder.


class Announcer:
    """Announces one `up` in its data folder and in the default one, where other commands look."""

    def __init__(self, data_dir: Path, yard: str) -> None:
        self._data_dir = data_dir
        self._yard = yard
        self._held: list[Announcement] = []

    def claim(self) -> None:
        """Lock the data folder for this `up`.

        Raises `YardFailed` if another `up` uses it, `click.UsageError` if it is not writable.
        """
        try:
            is_ours = self._take(self._data_dir)
        except OSError as error:
            raise click.UsageError(
                f"--data-dir {self._data_dir}: it cannot be written to: {error.strerror}"
            ) from error
        if not is_ours:
            raise YardFailed(
                f"{_other(self._data_dir)} uses {self._data_dir} already: use that one, or give"
                " another --data-dir or --yard"
            )

    def publish(self, url: str) -> str:
        """Publish the broker's URL; a warning if other commands cannot find it, else ""."""
        unfound = ""
        try:
            known = default_data_dir(self._yard)
            if self._data_dir.resolve() != known.resolve() and not self._take(known):
                unfound = f"{_other(known)} is what commands without a URL find"
        except SettingsError:
            unfound = "commands without a URL will not find it: HOME is not set"
        except OSError as error:
            unfound = f"commands without a URL will not find it: {error.filename}: {error.strerror}"
        for held in self._held:
            held.publish(url, self._data_dir)
        return unfound

    def withdraw(self) -> None:
        """Unlock the folders; idempotent."""
        while self._held:
            self._held.pop().withdraw()

    def _take(self, folder: Path) -> bool:
        announcement = Announcement(folder)
        is_ours = announcement.claim()
        if is_ours:
            self._held.append(announcement)
        return is_ours


def _other(folder: Path) -> str:
    other = running_up(folder)
    return (
        f"`tokenyard up` with pid {other.pid} at {public_url(other.url)}"
        if other
        else "another `tokenyard up`, which is about to start or to stop,"
    )
