"""Announces `tokenyard up` to other commands, and locks its data folder."""

from __future__ import annotations

from pathlib import Path

import click

from tokenyard.broker.url import public_url
from tokenyard.cli.up.local_yard import YardFailed
from tokenyard.process.running import Announcement, default_data_dir, running_up
from tokenyard.protocol.errors import SettingsError


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
