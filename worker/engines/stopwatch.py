"""How long each part of something took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by phase, in the order in which the phases began."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside; a phase that comes again goes on."""
        began = time.perf_counter()
        self.phases_s.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.phases_s[name] += time.perf_counter() - began
