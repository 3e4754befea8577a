"""Wheels that tests unpack themselves, since `.venv` must not have them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

#: Beside tox's environments, which no commit has either.
UNPACKED: Final = Path(__file__).parents[2] / ".tox"
_DOWNLOAD_S: Final = 900


def fetch_wheel(requirement: str, folder: Path, *options: str) -> Path:
    """The only wheel in a folder, where pip, with more ``options``, puts that of a requirement."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    subprocess.run([*command, *options, requirement], check=True, timeout=_DOWNLOAD_S)
    (wheel,) = folder.glob("*.whl")
    return wheel
