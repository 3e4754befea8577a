"""The user, the home folder and that for sockets, where a container or a user gives none of use.

Under an arbitrary uid (OpenShift, ``docker run --user``) the user has no name, and ``HOME`` is
missing, or is a folder that is not the user's.
"""

from __future__ import annotations

import getpass
import os
import tempfile
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
