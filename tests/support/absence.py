"""Missing requirements of a test: they skip it, but fail it on a CI machine."""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

import pytest


def lacks(reason: str) -> NoReturn:
    """Skip the test with a reason; fail it on a CI machine."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def imported(name: str, reason: str) -> Any:
    """Import a module that may be missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        lacks(reason)
