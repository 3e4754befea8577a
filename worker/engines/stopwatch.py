"""Measures the time of each phase of an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenyard import clock


class Stopwatch:
    """Seconds by phase, in the order in which phases began."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block; repeated phases add up."""
        began = clock.monotonic()
        self.phases_s.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.phases_s[name] += clock.monotonic() - began
