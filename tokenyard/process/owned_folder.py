"""Temporary folders of which a killed process leaves none for long.

The owner holds a lock on its folder, which the kernel releases with the process: so neither a pid
that was used again nor one of another container is taken for the owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def owned_folder(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """A new folder for this block, in ``parent`` or where temporary files go.

    Those with this prefix that nobody owns any more are removed.
    """
    remove_abandoned(prefix, parent)
    folder, lock = _make(prefix, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(prefix: str, parent: str | None = None) -> None:
    """Remove the folders with this prefix whose owners were killed."""
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # somebody owns it, or it is none of ours
            lock = _open(folder)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _make(prefix: str, parent: str | None) -> tuple[Path, int]:
    """A folder and its lock; again, if another process has removed it before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            lock = _open(folder)
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
