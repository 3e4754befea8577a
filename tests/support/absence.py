"""What a test needs and this machine lacks: the test is skipped, but on a CI machine it fails."""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

import pytest


def lacks(reason: str) -> NoReturn:
    """Skip, loudly; a failure where everything is to be tested."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def imported(name: str, reason: str) -> Any:
    """A module that may be missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        lacks(reason)
