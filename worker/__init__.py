"""The GPU side: a controller per host and the warm worker processes that it owns.

    from worker import WorkerController

is what a program uses that wants engines of its own and no yard (docs/warm-workers.md). It is
loaded when first used, and never brings vllm or torch along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

    from tokenyard.protocol.settings import WorkerSettings
    from worker.local.api import WorkerController
    from worker.local.engine import EngineHandle
    from worker.local.status import ProcessStatus
    from worker.models import AdapterSpec, ModelSpec

__all__ = [
    "AdapterSpec",
    "EngineHandle",
    "ModelSpec",
    "ProcessStatus",
    "WorkerController",
    "entrypoint",
]

_HOME = {
    "AdapterSpec": "models",
    "EngineHandle": "local.engine",
    "ModelSpec": "models",
    "ProcessStatus": "local.status",
    "WorkerController": "local.api",
}


def entrypoint(
    settings: WorkerSettings,
    ready_event: Event | None = None,
    pipe: Connection | None = None,
    *,
    die_with_parent: bool = True,
) -> NoReturn:
    """Run a host's controller in a process of its own, the target of a `multiprocessing.Process`.

    ``ready_event`` is set once each device has its worker in the yard: with the model, or warm
    where there is a models file. Then ``pipe`` has its
    `tokenyard.process.embedding.ServiceAddress`; where it cannot start, a `StartupError`, and the
    event is never set:
    `tokenyard.process.embedding.wait_started` waits for either. SIGTERM (``process.terminate()``),
    SIGINT and, with ``die_with_parent``, the end of the parent stop it in order: running requests
    may finish for ``grace_s``. The process must not be a daemonic one, since it has children.
    """
    from tokenyard.process.embedding import run_embedded
    from worker.embedded import EmbeddedController

    run_embedded(
        lambda: EmbeddedController(settings),
        settings,
        ready_event=ready_event,
        pipe=pipe,
        die_with_parent=die_with_parent,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
