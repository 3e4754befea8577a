"""The GPU side: one controller per host, which owns the host's warm worker processes.

A program that wants engines of its own, without a yard, uses (docs/warm-workers.md):

    from worker import WorkerController

Names load on first use. None of them imports vllm or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

    from tokenyard.protocol.settings import WorkerSettings
    from worker.local.api import EngineHandle, WorkerController
    from worker.local.pool import ProcessStatus
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
    "EngineHandle": "local.api",
    "ModelSpec": "models",
    "ProcessStatus": "local.pool",
    "WorkerController": "local.api",
}


def entrypoint(
    settings: WorkerSettings,
    ready_event: Event | None = None,
    pipe: Connection | None = None,
    *,
    die_with_parent: bool = True,
) -> NoReturn:
    """Run a host's controller as the target of a `multiprocessing.Process`.

    Once each device has a worker in the yard (holding the model, or warm with a models file),
    ``ready_event`` is set and ``pipe`` receives a `tokenyard.process.embedding.ServiceAddress`.
    If the controller cannot start, ``pipe`` receives a `StartupError` and the event stays unset.
    `tokenyard.process.embedding.wait_started` waits for either.

    SIGTERM (``process.terminate()``), SIGINT and, with ``die_with_parent``, the parent's exit
    stop the controller; running requests have ``grace_s`` to finish. The process must not be
    daemonic, because it starts children.
    """
    from tokenyard.process.embedding import run_embedded
    from worker.host.controller import EmbeddedController

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
