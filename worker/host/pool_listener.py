"""What a pool reports to its owner."""

from __future__ import annotations

from typing import Protocol

from tokenyard.scripts import Why
from worker.host.allocation import Goal
from worker.host.diagnosis import FailedStart
from worker.host.process_handle import WorkerProcessHandle
from worker.messages import ToController


class PoolListener(Protocol):
    """Called by the pool, in its thread."""

    def changed(self, member: WorkerProcessHandle) -> None:
        """A process has changed its state."""

    def serves(self, member: WorkerProcessHandle) -> None:
        """An engine is up and may be given work."""

    def gives_way(self, member: WorkerProcessHandle) -> None:
        """A process is about to release its model: its unfinished requests must move on."""

    def died(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        """A process is dead: its requests must move on immediately."""

    def start_failed(self, member: WorkerProcessHandle, failure: FailedStart) -> None:
        """A process died before it was warm, or could not load its model."""

    def failed(self, goal: Goal, reason: str, *, is_lost: bool = False) -> bool:
        """A model could not be loaded; returns whether the pool tries again.

        ``is_lost``: its process was killed from outside, which may be no fault of the model.
        """

    def refused(self, member: WorkerProcessHandle, reason: str) -> None:
        """A process cannot run a command that has nothing to do with a goal."""

    def heard(self, member: WorkerProcessHandle, message: ToController) -> None:
        """A process has sent a message that does not concern the pool."""
