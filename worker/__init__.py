"""The GPU side: a controller per host and the warm worker processes that it owns.

    from worker import WorkerController

is what a program uses that wants engines of its own and no yard (docs/warm-workers.md). It is
loaded when first used, and never brings vllm or torch along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.local import WorkerController
    from worker.local_engine import EngineHandle
    from worker.local_status import ProcessStatus
    from worker.models import AdapterSpec, ModelSpec

__all__ = ["AdapterSpec", "EngineHandle", "ModelSpec", "ProcessStatus", "WorkerController"]

_HOME = {
    "AdapterSpec": "models",
    "EngineHandle": "local_engine",
    "ModelSpec": "models",
    "ProcessStatus": "local_status",
    "WorkerController": "local",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
