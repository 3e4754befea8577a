"""A controller in a process of another program, which reports when its workers are up."""

from __future__ import annotations

import multiprocessing
import os
import threading

from tokenyard import clock
from tokenyard.process.embedding import ServiceAddress, started_address
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.settings import WorkerSettings
from worker.host.controller import Controller
from worker.host.process_state import State

#: States of a worker that is up, with a single model.
_HOLDING = frozenset({State.READY, State.ATTACHED})
#: States of a worker that is up, with a models file: models load on demand.
_WARM = frozenset({State.WARM, State.LOADING, *_HOLDING})


class EmbeddedController(Controller):
    """A controller that another thread can wait for."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises `SettingsError` in a daemonic process, which cannot have children."""
        if multiprocessing.current_process().daemon:
            raise SettingsError(
                ["a controller starts processes, so its own must not be made with daemon=True"]
            )
        super().__init__(settings)
        self._ready = threading.Event()

    def run_once(self) -> None:
        """Run one turn, then check whether every device has its worker."""
        super().run_once()
        if not self._ready.is_set() and self._is_up():
            self._ready.set()

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until every device has a worker that is up and in the yard."""
        return clock.wait(self._ready, timeout_s)

    def address(self) -> ServiceAddress:
        """The address of this controller."""
        workers = tuple(member.worker for member in self._pool.members if member.worker)
        return started_address("worker", self._settings, os.getpid(), workers=workers)

    def _is_up(self) -> bool:
        wanted = _WARM if self._settings.models else _HOLDING
        up = {one.device for one in self._pool.members if one.worker and one.state in wanted}
        return up >= self._pool.goals.keys() - self._pool.closed
