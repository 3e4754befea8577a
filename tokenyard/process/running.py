"""How programs find the yard that `tokenyard up` runs on this machine.

While `up` runs it holds a lock in its data folder, with the file ``up.json`` beside it, which only
its user may read (a URL can have a password). The kernel releases the lock however `up` ends, so
the file of a killed one is ignored.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from tokenyard import clock
from tokenyard.broker.url import with_credentials
from tokenyard.process.home import expanded
from tokenyard.protocol.errors import BrokerUnavailable, SettingsError

YARD_DEFAULT: Final = "main"
URL_VARIABLE: Final = "TOKENYARD_REDIS_URL"
YARD_VARIABLE: Final = "TOKENYARD_YARD"
_FILE: Final = "up.json"
_LOCK: Final = "up.lock"
#: A program that checks whether `up` runs holds the lock for an instant.
_CLAIM_WAIT_S: Final = 0.5
_POLL_S: Final = 0.02
#: Folders of yards that are looked at for an error, and yards that it names.
_MOST_FOLDERS: Final = 100
_MOST_NAMED: Final = 3


class Running(Struct, frozen=True):
    """What `up` publishes about itself."""

    url: str
    pid: int
    data_dir: str


def default_data_dir(yard: str) -> Path:
    """The folder for the data of a yard, by the XDG rules.

    Raises `SettingsError` for a user without a home.
    """
    home = Path(os.environ.get("XDG_DATA_HOME") or expanded("~/.local/share"))
    if home.parts[0] == "~":
        raise SettingsError(["HOME is not set, so there is no default folder: give --data-dir"])
    # A yard may be called "..".
    return home / "tokenyard" / f"yard-{yard}"


def running_up(folder: Path) -> Running | None:
    """The `up` that is announced in ``folder`` and running, if any."""
    try:
        running = msgspec.json.decode((folder / _FILE).read_bytes(), type=Running)
        lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, msgspec.DecodeError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return running
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(lock)
    return None  # the writer of the file was killed


def running_url(yard: str) -> str:
    """The broker's URL of the yard that `up` runs on this machine; "" where none runs."""
    with contextlib.suppress(SettingsError):  # a user without a home
        if running := running_up(default_data_dir(yard)):
            return running.url
    return ""


def _running_yards() -> list[str]:
    """The yards that `up` runs on this machine for this user, in order; a few at most."""
    with contextlib.suppress(OSError, SettingsError):  # a user without a home
        folder = default_data_dir("")
        folders = itertools.islice(folder.parent.glob(f"{folder.name}*"), _MOST_FOLDERS)
        found = [one.name.removeprefix(folder.name) for one in folders if running_up(one)]
        return sorted(found)[:_MOST_NAMED]
    return []


def no_broker(yard: str) -> BrokerUnavailable:
    """The error for a missing URL; names the other yards that run here."""
    others = "".join(f", give `--yard {name}`, which runs here" for name in _running_yards())
    return BrokerUnavailable(
        f"no broker for yard {yard!r}: start `tokenyard up` on this machine, or set {URL_VARIABLE}"
        f'{others}, or give the URL: `tokenyard --redis-url URL`, Client("URL")'
    )


def find_yard(url: str | None, yard: str | None) -> tuple[str, str]:
    """The broker's URL and the yard, given or found.

    Without a URL, ``TOKENYARD_REDIS_URL`` and ``TOKENYARD_YARD`` apply, as for the command
    `tokenyard`, and then the yard that `up` runs on this machine. Raises `BrokerUnavailable` where
    there is neither.
    """
    if url is not None:
        return with_credentials(url), YARD_DEFAULT if yard is None else yard
    if yard is None:
        yard = os.environ.get(YARD_VARIABLE) or YARD_DEFAULT
    url = broker_url(os.environ.get(URL_VARIABLE), yard)
    if not url:
        raise no_broker(yard)
    return url, yard


def broker_url(given: str | None, yard: str) -> str:
    """The broker's URL, given or that of the `up` of this machine; "" if there is neither.

    A given one gets the user and password of the environment. Raises `SettingsError`.
    """
    return with_credentials(given) if given else running_url(yard)


class Announcement:
    """Announces a running `up` in one folder, which only one can hold at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None

    def claim(self) -> bool:
        """Lock the folder; False where another `up` has it. Raises `OSError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not lock_within(lock, _CLAIM_WAIT_S):
                os.close(lock)
                return False
            (self._folder / _FILE).unlink(missing_ok=True)
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        return True

    def publish(self, url: str, data_dir: Path) -> None:
        """Publish the broker's URL, once it runs."""
        running = Running(url, os.getpid(), str(data_dir.resolve()))
        temporary = self._folder / f"{_FILE}.new"
        temporary.unlink(missing_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as output:
            output.write(msgspec.json.encode(running))
        temporary.rename(self._folder / _FILE)

    def withdraw(self) -> None:
        """Release the folder; idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                (self._folder / _FILE).unlink(missing_ok=True)
            os.close(lock)


def lock_within(file: int, seconds: float, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file, unless another process holds the lock for longer than that."""
    until = clock.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.monotonic() > until:
                return False
            clock.sleep(_POLL_S)
        else:
            return True
