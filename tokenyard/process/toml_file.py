"""Reads a TOML file of settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tokenyard.protocol.errors import SettingsError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file; raises `SettingsError` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError([f"{path}: is not TOML: {error}"]) from error
