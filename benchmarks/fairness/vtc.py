"""A virtual token counter in the memory of one process, as the reference for the yard's.

Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, arXiv 2401.00588, algorithm 4:
with weights, and with the length of each answer known beforehand, which no real queue knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class VirtualTokenCounter(Generic[T]):
    """Requests by tenant; the next is of the tenant that has had the least."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._service = dict.fromkeys(weights, 0.0)
        self._waiting: dict[str, deque[tuple[float, T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tenant: str, cost: float, item: T) -> None:
        """Put a request behind those of its tenant; a rest before it was not saved up."""
        queue = self._waiting.get(tenant)
        if queue is None:
            least = min((self._service[other] for other in self._waiting), default=0.0)
            self._service[tenant] = max(self._service[tenant], least)
            queue = self._waiting[tenant] = deque()
        queue.append((cost, item))

    def take(self) -> T:
        """Take out the next request, and charge its tenant for it."""
        tenant = min(self._waiting, key=self._service.__getitem__)
        queue = self._waiting[tenant]
        cost, item = queue.popleft()
        self._service[tenant] += cost / self._weights[tenant]
        if not queue:
            del self._waiting[tenant]
        return item
