"""A models file that a test writes, and its faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenyard.protocol.errors import SettingsError
from worker.models import read_models

Write = Callable[[str], Path]


def faults(file: Path) -> list[str]:
    """The faults of a file, without its name."""
    with pytest.raises(SettingsError) as caught:
        read_models(file)
    assert all(fault.startswith(f"{file}: ") for fault in caught.value.errors)
    return [fault.removeprefix(f"{file}: ") for fault in caught.value.errors]


def fault(file: Path) -> str:
    """The only fault of a file."""
    [found] = faults(file)
    return found
