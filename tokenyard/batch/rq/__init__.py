"""Batch jobs at RQ: the queue, the worker, schedules and call-backs."""

from __future__ import annotations

import importlib.util


def is_installed() -> bool:
    """Whether RQ is here; the modules of this package import it."""
    return importlib.util.find_spec("rq") is not None
