"""Requests that were read from the intake and wait for a lane, by the model that serves them.

However many there are, a turn costs what it places: only the comparison with Redis
(`coordinator.dispatch.intake`) walks over all of them.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, KeysView
from itertools import chain, islice
from typing import Generic, TypeVar

from coordinator.dispatch.shares import PriorityQueue
from coordinator.dispatch.tenant_shares import TenantShares
from coordinator.placement.needs import Demand
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.keys import INTAKE_CLASSES

K = TypeVar("K", bound=Hashable)
_Key = tuple[str, str]  # an intake and an entry

#: Discarded keys stay in the heap until their time, or until they outnumber the rest by so many.
MOST_STALE = 64


class DelayQueue(Generic[K]):
    """A heap of keys and the times at which they are due; to discard a key takes constant time."""

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __iter__(self) -> Iterator[K]:
        """All keys, in any order."""
        return iter(self._times)

    def set(self, key: K, at_ms: float) -> None:
        """Make ``key`` due at that time (unix time)."""
        self._times[key] = at_ms
        heapq.heappush(self._heap, (at_ms, key))

    def discard(self, key: K) -> None:
        """Take a key out, if it is there."""
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
    def first(self) -> tuple[float, K] | None:
        """The earliest time and its key; None where it is empty."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    @property
    def next_ms(self) -> float | None:
        """The earliest time; None where it is empty."""
        first = self.first
        return first[0] if first else None


class ModelQueue:
    """The requests for one model that could run now: suspects, retries, and tenants by service."""

    def __init__(self, tenants: TenantShares | None = None) -> None:
        self._tenants = tenants or TenantShares()
        self._suspects: OrderedDict[str, QueuedRequest] = OrderedDict()
        self._retries: OrderedDict[str, QueuedRequest] = OrderedDict()
        #: By tenant; "" is none, and only that queue may be empty.
        self._queues = {"": PriorityQueue()}
        # When the oldest request of each tenant came in, or of one that has left since.
        self._oldest: DelayQueue[str] = DelayQueue()
        self._count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All requests, suspects first, tenants in any order."""
        yield from self._suspects.values()
        yield from self._retries.values()
        yield from chain.from_iterable(self._queues.values())

    def add(self, queued: QueuedRequest) -> None:
        """Put a request behind those of its tenant, class and client."""
        if queued.intake == "retry":
            self._retries_like(queued)[queued.entry] = queued
        else:
            queue = self._queues.get(queued.tenant)
            if queue is None:
                queue = self._queues[queued.tenant] = PriorityQueue()
                self._oldest.set(queued.tenant, queued.since_ms)
            queue.add(queued)
        self._count += 1
        self.tokens += queued.tokens

    def discard(self, queued: QueuedRequest, *, is_served: bool = False) -> None:
        """Take a request out, if it is here; ``is_served`` uses its class's and client's turn."""
        if queued.intake == "retry":
            was_here = self._retries_like(queued).pop(queued.entry, None) is not None
        else:
            queue = self._queues.get(queued.tenant)
            was_here = queue is not None and queue.discard(queued, is_served=is_served)
            if queue is not None and not queue and queued.tenant:
                del self._queues[queued.tenant]
                self._oldest.discard(queued.tenant)
        if was_here:
            self._count -= 1
            self.tokens -= queued.tokens

    def _retries_like(self, queued: QueuedRequest) -> OrderedDict[str, QueuedRequest]:
        return self._suspects if queued.is_suspect else self._retries

    @property
    def suspects(self) -> Iterator[QueuedRequest]:
        """Requests that may have killed a worker, in order."""
        yield from self._suspects.values()

    @property
    def others(self) -> Iterator[QueuedRequest]:
        """The rest in the order in which it should be placed, retries first."""
        if not self._tenants.first:
            yield from self._retries.values()
            yield from chain.from_iterable(self._queues.values())
            return
        spent: dict[str, float] = dict(self._tenants.planned)
        for queued in self._retries.values():
            yield queued
            spent[queued.tenant] = spent.get(queued.tenant, 0.0) + self._tenants.amount(queued)
        yield from self._tenants.order(self._queues, spent)

    @property
    def clients(self) -> int:
        """How many clients compete, at most: those of the tenant and class that has most.

        Of many tenants only the first in line count.
        """
        names = {"", *self._tenants.first} if self._tenants.first else self._queues.keys()
        queues = (self._queues.get(name) for name in names)
        return max((queue.clients for queue in queues if queue), default=0)

    @property
    def since_ms(self) -> float:
        """When the oldest came in, about."""
        boxes = (self._suspects, self._retries)
        times = [next(iter(box.values())).since_ms for box in boxes if box]
        if self._queues[""]:
            times.append(self._queues[""].since_ms)
        while (first := self._oldest.first) is not None:
            since_ms = self._queues[first[1]].since_ms
            if since_ms <= first[0]:
                times.append(since_ms)
                break
            self._oldest.set(first[1], since_ms)
        return min(times)


class Backlog:
    """All requests that wait: in a queue, in back-off, or past their deadline."""

    def __init__(self, tenants: TenantShares | None = None) -> None:
        self.tenants = tenants or TenantShares()
        self.clear()

    def clear(self) -> None:
        """Forget all requests."""
        #: By intake; those of tenants are there while they have any.
        self._entries: dict[str, dict[str, QueuedRequest]] = {n: {} for n in INTAKE_CLASSES}
        self._count = 0
        self._queues: dict[str, ModelQueue] = {}  # none is empty
        self._backoffs: DelayQueue[_Key] = DelayQueue()
        self._deadlines: DelayQueue[_Key] = DelayQueue()
        self._late: dict[_Key, QueuedRequest] = {}

    def __len__(self) -> int:
        return self._count

    def count(self, intake: str) -> int:
        """How many requests of an intake there are."""
        return len(self._entries.get(intake, ()))

    def ids(self, intake: str) -> list[str]:
        """The entries of an intake, in their order there."""
        return list(self._entries.get(intake, ()))

    def get(self, intake: str, entry: str) -> QueuedRequest | None:
        """The request of that entry, if it is here."""
        return self._entries.get(intake, {}).get(entry)

    @property
    def intakes(self) -> KeysView[str]:
        """The common intakes, and those of tenants with requests here."""
        return self._entries.keys()

    @property
    def models(self) -> KeysView[str]:
        """Models with requests that could run now."""
        return self._queues.keys()

    @property
    def clients(self) -> int:
        """How many clients compete for the same lanes, at most."""
        return max((queue.clients for queue in self._queues.values()), default=0)

    def queue(self, model: str) -> ModelQueue | None:
        """The requests for that model that could run now."""
        return self._queues.get(model)

    def add(self, queued: QueuedRequest) -> None:
        """Keep a request until it is placed or answered."""
        entries = self._entries.setdefault(queued.intake, {})
        if queued.entry in entries:  # read twice
            self.remove(entries[queued.entry])
            entries = self._entries.setdefault(queued.intake, {})
        entries[queued.entry] = queued
        self._count += 1
        if queued.deadline_ms is not None:
            self._deadlines.set((queued.intake, queued.entry), queued.deadline_ms)
        if queued.not_before_ms:
            self._backoffs.set((queued.intake, queued.entry), queued.not_before_ms)
        else:
            self._enqueue(queued)

    def remove(self, queued: QueuedRequest, *, is_served: bool = False) -> None:
        """Forget a request, if it is here; ``is_served``: because it was dispatched."""
        entries = self._entries.get(queued.intake, {})
        if entries.pop(queued.entry, None) is not None:
            self._count -= 1
            if not entries and queued.intake not in INTAKE_CLASSES:
                del self._entries[queued.intake]
        self._dequeue(queued, is_served=is_served)
        if queued.deadline_ms is not None or queued.not_before_ms:
            key = (queued.intake, queued.entry)
            self._deadlines.discard(key)
            self._backoffs.discard(key)
            self._late.pop(key, None)

    def _enqueue(self, queued: QueuedRequest) -> None:
        queue = self._queues.get(queued.model)
        if queue is None:
            queue = self._queues[queued.model] = ModelQueue(self.tenants)
        queue.add(queued)

    def _dequeue(self, queued: QueuedRequest, *, is_served: bool = False) -> None:
        queue = self._queues.get(queued.model)
        if queue is not None:
            queue.discard(queued, is_served=is_served)
            if not queue:
                del self._queues[queued.model]

    def advance(self, now_ms: float) -> None:
        """Take requests past their deadline out of the queues; put those after back-off in."""
        for key in self._deadlines.take_due(now_ms):
            queued = self._entries[key[0]][key[1]]
            self._backoffs.discard(key)
            self._dequeue(queued)
            self._late[key] = queued
        for key in self._backoffs.take_due(now_ms):
            self._enqueue(self._entries[key[0]][key[1]])

    def late(self, most: int) -> list[QueuedRequest]:
        """Requests past their deadline, the earliest first."""
        return list(islice(self._late.values(), most))

    @property
    def next_ms(self) -> float | None:
        """When the next back-off or deadline ends; None where there is none."""
        times = [at for at in (self._backoffs.next_ms, self._deadlines.next_ms) if at is not None]
        return min(times, default=None)

    def by_model(self) -> Counter[str]:
        """How many requests wait for each model, in back-off or not."""
        found = Counter({model: len(queue) for model, queue in self._queues.items()})
        found.update(self._entries[intake][entry].model for intake, entry in self._backoffs)
        return found

    def demands(self, now_ms: float) -> list[Demand]:
        """What could run now if it had a lane, for each model that the yard knows."""
        self.advance(now_ms)
        return [
            Demand(
                model,
                requests=len(queue),
                tokens=queue.tokens,
                oldest_wait_s=max(0.0, now_ms - queue.since_ms) / 1000,
            )
            for model, queue in self._queues.items()
            if model
        ]
