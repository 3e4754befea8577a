"""The coordinator: assigns waiting requests to workers. CPU only; imports neither torch nor vllm.

`entrypoint` is the target of a process of your own program (docs/run.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

    from tokenyard.protocol.settings import CoordinatorSettings

__all__ = ["entrypoint"]


def entrypoint(
    settings: CoordinatorSettings,
    ready_event: Event | None = None,
    pipe: Connection | None = None,
    *,
    die_with_parent: bool = True,
) -> NoReturn:
    """Run a coordinator as the target of a `multiprocessing.Process`.

    ``ready_event`` is set once it leads or stands by; then ``pipe`` has its
    `tokenyard.process.embedding.ServiceAddress`. Where it cannot start, ``pipe`` has a
    `StartupError` and the event stays clear; `tokenyard.process.embedding.wait_started` waits for
    either. SIGTERM (``process.terminate()``), SIGINT and, with ``die_with_parent``, the end of the
    parent stop it cleanly.
    """
    from coordinator.coordinator import Coordinator
    from tokenyard.process.embedding import run_embedded

    run_embedded(
        lambda: Coordinator(settings),
        settings,
        ready_event=ready_event,
        pipe=pipe,
        die_with_parent=die_with_parent,
    )
