"""Answers whether this host could give a model other weights, before anybody tries."""

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
    """Looks at checkpoints, each in a thread of its own: a file system may take its time."""

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
        """Look, and acknowledge the command when that is done."""
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
            return f"{command.model!r} does not stand in the models file of this host"
        try:
            check_weights(self._settings, spec, command.weights)
        except Unsupported as error:
            return str(error)
        except OSError as error:
            return f"{command.weights}: {error.strerror or error}"
        except Exception as error:  # noqa: BLE001  # of a hostile file; somebody waits for a word
            return f"{command.weights}: {type(error).__name__}: {error}"
        return ""
