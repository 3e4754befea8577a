"""Counts of published results: each worker process keeps its own, the controller sums them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from tokenyard.protocol.keys import PRIORITY_CLASSES
from tokenyard.protocol.replies import Status
from tokenyard.telemetry.metrics import Histogram

#: Statuses of results that a worker publishes.
ENDS: Final[tuple[Status, ...]] = ("completed", "failed", "expired")
DIRECTIONS: Final = ("input", "output")
Times = defaultdict[str, Histogram]


@dataclass(slots=True)
class PublishedCounts:
    """Counts of a process's publications since its start, by base model."""

    results: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # model, class, status
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # model, direction
    inputs: Counter[tuple[str, str]] = field(default_factory=Counter)  # model, task
    media: Counter[tuple[str, str]] = field(default_factory=Counter)  # model, modality
    stale: int = 0  # publications refused by the fence
    faults: int = 0  # requests returned because the engine could not serve them
    ttft: Times = field(default_factory=lambda: defaultdict(Histogram))
    tpot: Times = field(default_factory=lambda: defaultdict(Histogram))
    e2e: Times = field(default_factory=lambda: defaultdict(Histogram))

    def know(self, models: Iterable[str]) -> None:
        """Initialize the counts of these models to 0."""
        for model in models:
            for labels in product((model,), PRIORITY_CLASSES, ENDS):
                self.results.setdefault(labels, 0)
            for direction in DIRECTIONS:
                self.tokens.setdefault((model, direction), 0)
            for times in (self.ttft, self.tpot, self.e2e):
                times[model].add(Histogram())

    def add(self, other: PublishedCounts) -> None:
        """Add the counts of ``other``."""
        self.results.update(other.results)
        self.tokens.update(other.tokens)
        self.inputs.update(other.inputs)
        self.media.update(other.media)
        self.stale += other.stale
        self.faults += other.faults
        _add(self.ttft, other.ttft)
        _add(self.tpot, other.tpot)
        _add(self.e2e, other.e2e)

    def copy(self) -> PublishedCounts:
        """Return an independent copy."""
        copied = PublishedCounts()
        copied.add(self)
        return copied


def _add(ours: Times, theirs: Times) -> None:
    for model, histogram in theirs.items():
        ours[model].add(histogram)
