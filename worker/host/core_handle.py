"""The core of one process of the pool: it has the device and the model, and outlives its fronts."""

from __future__ import annotations

import contextlib
import logging
from multiprocessing.connection import Connection

from tokenyard.process.home import folder_for_sockets
from tokenyard.process.owned_folder import owned_folder
from tokenyard.protocol.settings import WorkerSettings
from worker.host.fork_server import ForkedProcess
from worker.process.core import main

log = logging.getLogger("tokenyard.worker.pool")


class CoreHandle:
    """One core, from its start to its end."""

    def __init__(
        self, settings: WorkerSettings, name: str, device: int, output: Connection
    ) -> None:
        """Start it; its standard error goes to ``output``.

        Raises `EOFError` or `OSError` where no process can be started.
        """
        self._folder = contextlib.ExitStack()
        folder = self._folder.enter_context(owned_folder("tokenyard-core-", folder_for_sockets()))
        self.address = str(folder / "core")  # where its front connects
        arguments = (settings, device, log.getEffectiveLevel(), self.address, output)
        self.process = ForkedProcess(target=main, args=arguments, name=f"{name} core")
        try:
            self.process.start()
        except (EOFError, OSError):
            self._folder.close()
            raise

    def exit_status(self, wait_s: float = 0.0) -> int | None:
        """The status of a core that is dead, or ends within ``wait_s``; None if it lives."""
        self.process.join(wait_s)
        return self.process.exitcode

    def end(self) -> None:
        """Kill it, and leave nothing of it."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self._folder.close()
