"""Checks whether this host can load other weights for a model, before it tries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from tokenyard.protocol.commands import Acknowledgement, Command
from tokenyard.protocol.settings import WorkerSettings
from worker.engines import Unsupported
from worker.engines.loading import check_weights
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.control")


class WeightsCheck:
    """Checks checkpoints, each in its own thread: a file system may be slow."""

    def __init__(
        self,
        settings: WorkerSettings,
        catalog: Mapping[str, ModelSpec],
        acknowledge: Callable[[str, Acknowledgement], None],
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._acknowledge = acknowledge

    def begin(self, entry: str, command: Command) -> None:
        """Start a check; it acknowledges the command when it is done."""
        threading.Thread(
            target=self._answer, args=(entry, command), name="check", daemon=True
        ).start()

    def _answer(self, entry: str, command: Command) -> None:
        reason = self._why_not(command)
        if reason:
            log.warning("%s: check %s: %s", command.worker, command.model, reason)
        said = Acknowledgement(worker=command.worker, done=not reason, reason=reason)
        self._acknowledge(entry, said)

    def _why_not(self, command: Command) -> str:
        spec = self._catalog.get(command.model)
        if spec is None:
            return f"{command.model!r} is not in the models file of this host"
        try:
            check_weights(self._settings, spec, command.weights)
        except Unsupported as error:
            return str(error)
        except OSError as error:
            return f"{command.weights}: {error.strerror or error}"
        except Exception as error:  # noqa: BLE001  # of a hostile file; the sender waits for an answer
            return f"{command.weights}: {type(error).__name__}: {error}"
        return ""
