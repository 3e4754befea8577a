"""PoolGroups of processes that run one model together, each as one rank."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenyard.scripts import Why
from worker.engines import RankGroup
from worker.host.allocation import Goal
from worker.host.process_handle import WorkerProcessHandle


class PoolGroups:
    """Forms and ends the groups of a host."""

    def __init__(self, members: Sequence[WorkerProcessHandle]) -> None:
        self._members = members
        self._numbers = itertools.count()
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of their sockets

    def start(self) -> None:
        """Make the folder in which the ranks find each other."""
        self._folder = tempfile.TemporaryDirectory(prefix="tokenyard-")

    def stop(self) -> None:
        """Remove the folder; idempotent."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def form(
        self,
        leader: WorkerProcessHandle,
        followers: Iterable[WorkerProcessHandle],
        goal: Goal,
        weights: str,
    ) -> None:
        """Load the goal's model on all of them together."""
        if self._folder is None:
            raise RuntimeError("the pool has not been started")
        address = str(Path(self._folder.name) / f"group-{next(self._numbers)}")
        for rank, member in enumerate(followers, start=1):
            member.attach(goal.spec, RankGroup(address, rank, goal.devices))
        leader.load(goal.spec, RankGroup(address, 0, goal.devices), weights)

    def mates(self, member: WorkerProcessHandle) -> list[WorkerProcessHandle]:
        """The other members of its group."""
        return [mate for mate in self._members if mate.is_mate_of(member) and mate is not member]

    def end(self, member: WorkerProcessHandle, why: Why, reason: str) -> None:
        """Kill the other ranks of its group, which would wait for it forever."""
        rank = member.group.rank if member.group else 0
        for mate in self.mates(member):
            mate.exit_cause = mate.exit_cause or why
            mate.last_words = mate.last_words or f"rank {rank}: {reason}"
            mate.kill()
