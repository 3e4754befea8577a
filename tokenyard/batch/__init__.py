"""Batch jobs: a file of requests in, a file of answers out, exactly one for each line.

    from tokenyard.batch import run_batch

    state = run_batch("in.jsonl", "out.jsonl", redis_url="redis://localhost:6379")
    print(state.status, state.counts)

Names are loaded on first use, so only the functions that use RQ need it installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenyard.batch.api import BatchOptions, run_batch, stream_batch
    from tokenyard.batch.files import UnreadableFile
    from tokenyard.batch.outputs import OutputInUse
    from tokenyard.batch.rq.jobs import BatchJob, UnknownJob, submit_batch
    from tokenyard.batch.runner import BatchBroken
    from tokenyard.batch.state import Batch, BatchSpec, BatchState, RequestCounts

__all__ = [
    "Batch",
    "BatchBroken",
    "BatchJob",
    "BatchOptions",
    "BatchSpec",
    "BatchState",
    "OutputInUse",
    "RequestCounts",
    "UnknownJob",
    "UnreadableFile",
    "run_batch",
    "stream_batch",
    "submit_batch",
]

_MODULES = {
    "api": ("BatchOptions", "run_batch", "stream_batch"),
    "files": ("UnreadableFile",),
    "rq.jobs": ("BatchJob", "UnknownJob", "submit_batch"),
    "outputs": ("OutputInUse",),
    "runner": ("BatchBroken",),
    "state": ("Batch", "BatchSpec", "BatchState", "RequestCounts"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
