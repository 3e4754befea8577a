"""When something is due, for many things of which few ever are: a heap."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=tuple[str, str])

#: What was taken out stays in the heap until its time, or until it outnumbers the rest by so many.
MOST_STALE = 64


class DelayQueue(Generic[K]):
    """Tells in order what is due; setting and taking out costs the same however much is in it."""

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def set(self, key: K, at_ms: float) -> None:
        """Let ``key`` be due at that time (unix time)."""
        self._times[key] = at_ms
        heapq.heappush(self._heap, (at_ms, key))

    def discard(self, key: K) -> None:
        """Take it out, if it is there."""
        self._times.pop(key, None)
        if len(self._heap) > 2 * len(self._times) + MOST_STALE:
            self._heap = [(at_ms, key) for key, at_ms in self._times.items()]
            heapq.heapify(self._heap)

    def take_due(self, now_ms: float) -> Iterator[K]:
        """Take out what is due, the earliest first."""
        while (next_ms := self.next_ms) is not None and next_ms <= now_ms:
            key = heapq.heappop(self._heap)[1]
            del self._times[key]
            yield key

    @property
    def next_ms(self) -> float | None:
        """When something is due next; None where nothing is in it."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
