"""A controller in a process of one's own program, which says when its workers are up."""

from __future__ import annotations

import multiprocessing
import os
import threading

from tokenyard.process.embedding import ServiceAddress, started_address
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.settings import WorkerSettings
from worker.host.controller import Controller
from worker.host.process_state import State

#: With one model its workers are up when they hold it.
_HOLDING = frozenset({State.READY, State.ATTACHED})
#: With a models file: when they may load whatever is asked for.
_WARM = frozenset({State.WARM, State.LOADING, *_HOLDING})


class EmbeddedController(Controller):
    """A controller that can be waited for."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises `SettingsError` in a daemonic process, which may have no children."""
        if multiprocessing.current_process().daemon:
            raise SettingsError(
                ["a controller starts processes, so its own must not be made with daemon=True"]
            )
        super().__init__(settings)
        self._ready = threading.Event()

    def run_once(self) -> None:
        """One turn, and a look whether every device has its worker."""
        super().run_once()
        if not self._ready.is_set() and self._is_up():
            self._ready.set()

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until every device has a worker that is up and in the yard."""
        return self._ready.wait(timeout_s)

    def address(self) -> ServiceAddress:
        """Where it is."""
        workers = tuple(member.worker for member in self._pool.members if member.worker)
        return started_address("worker", self._settings, os.getpid(), workers=workers)

    def _is_up(self) -> bool:
        wanted = _WARM if self._settings.models else _HOLDING
        up = {one.device for one in self._pool.members if one.worker and one.state in wanted}
        return up >= self._pool.goals.keys() - self._pool.closed
