"""The user, the home folder, and temporary folders, where a container or a user gives none of use.

Under an arbitrary uid (OpenShift, ``docker run --user``) the user has no name, and ``HOME`` is
missing, or is a folder that is not the user's.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Of a folder for sockets: the rest is for names in it.
_MOST_BYTES: Final = 64
_SHORT_FOLDER: Final = "/tmp"  # noqa: S108 - others make folders of their own in it


def user_name() -> str:
    """The name of the user; ``uid-1000`` where the uid has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


def expanded(path: str | Path) -> Path:
    """The path with the home folder for ``~``; unchanged where that home is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def cache_environment() -> dict[str, str]:
    """Variables that put what vLLM compiles into a temporary folder, where the home is of no use.

    Without a home, the folder is the home too. Models stay in a home that can only be read.
    """
    home = expanded("~")
    if not home.is_absolute():
        return {"HOME": str(folder)} if (folder := _temporary()) else {}
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    places = {
        "VLLM_CACHE_ROOT": caches,
        "FLASHINFER_WORKSPACE_BASE": home / ".cache",
        "TRITON_CACHE_DIR": home,
    }
    unusable = [name for name, place in places.items() if not _is_writable(place)]
    folder = _temporary() if unusable else None
    return {name: str(folder / name.lower()) for name in unusable} if folder else {}


def folder_for_sockets() -> str:
    """Where a folder for Unix sockets can be made, whose whole names have at most 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _MOST_BYTES else _SHORT_FOLDER


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _temporary() -> Path | None:
    """A folder that only this user can write to, as code is run from it; None: another has it."""
    folder = Path(tempfile.gettempdir()) / f"tokenyard-home-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder if is_ours and folder.is_dir() and not folder.is_symlink() else None


# Temporary folders of which a killed process leaves none for long. The owner holds a lock on its
# folder, which the kernel releases with the process: so neither a pid that was used again nor one
# of another container is taken for the owner.


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
