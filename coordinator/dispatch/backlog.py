"""What was read from the intake and waits for a lane, by the model that serves it.

However much is held, a turn costs what it places: nothing here walks over all of it but what
compares it with Redis (`coordinator.dispatch.audit`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, KeysView
from itertools import chain, islice

from coordinator.dispatch.delay_queue import DelayQueue
from coordinator.dispatch.demand import Demand
from coordinator.dispatch.shares import ClassQueue, Shares, TurnOf, by_client
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.keys import INTAKE_CLASSES, PRIORITY_CLASSES, IntakeClass

_Key = tuple[IntakeClass, str]


class ModelQueue:
    """The requests for one model that could run now."""

    def __init__(self, turn_of: TurnOf = by_client) -> None:
        """``turn_of`` says whose turn a request of a class is."""
        self._suspects: OrderedDict[str, QueuedRequest] = OrderedDict()
        self._retries: OrderedDict[str, QueuedRequest] = OrderedDict()
        self._lines = {name: ClassQueue(turn_of) for name in PRIORITY_CLASSES}
        self._shares = Shares()
        self._classes = 0  # in which something waits
        self._count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All of it, suspects first."""
        yield from self._suspects.values()
        yield from self.others

    def add(self, queued: QueuedRequest) -> None:
        """Put a request behind those of its class and client."""
        if queued.intake == "retry":
            self._again(queued)[queued.entry] = queued
        else:
            line = self._lines[queued.intake]
            if not line:
                self._shares.join(queued.intake)
                self._classes += 1
            line.add(queued)
        self._count += 1
        self.tokens += queued.tokens

    def discard(self, queued: QueuedRequest, *, is_served: bool = False) -> None:
        """Take a request out, if it is here; served, it was the turn of its class and client."""
        if queued.intake == "retry":
            was_here = self._again(queued).pop(queued.entry, None) is not None
        else:
            line = self._lines[queued.intake]
            was_here = line.discard(queued, is_served=is_served)
            if is_served and self._classes > 1:
                self._shares.note_served(queued.intake)
            if was_here and not line:
                self._classes -= 1
        if was_here:
            self._count -= 1
            self.tokens -= queued.tokens

    def _again(self, queued: QueuedRequest) -> OrderedDict[str, QueuedRequest]:
        return self._suspects if queued.is_suspect else self._retries

    @property
    def suspects(self) -> Iterator[QueuedRequest]:
        """Those that must run alone, in order."""
        yield from self._suspects.values()

    @property
    def others(self) -> Iterator[QueuedRequest]:
        """The rest in the order in which it should be placed: first what was on a worker before."""
        yield from self._retries.values()
        yield from self._shares.order(self._lines)

    @property
    def clients(self) -> int:
        """How many clients compete, at most: those of the class that has most."""
        return max(line.clients for line in self._lines.values())

    @property
    def since_ms(self) -> float:
        """When the oldest came in, about."""
        again = (next(iter(box.values())) for box in (self._suspects, self._retries) if box)
        lines = (line.since_ms for line in self._lines.values() if line)
        return min(chain((one.since_ms for one in again), lines))


class Backlog:
    """All requests that are held: in a queue, pausing, or late."""

    def __init__(self, turn_of: TurnOf = by_client) -> None:
        """``turn_of`` is for the queues; see `ModelQueue`."""
        self._turn_of = turn_of
        self._entries: dict[IntakeClass, dict[str, QueuedRequest]] = {n: {} for n in INTAKE_CLASSES}
        self._queues: dict[str, ModelQueue] = {}  # none is empty
        self._pauses: DelayQueue[_Key] = DelayQueue()
        self._deadlines: DelayQueue[_Key] = DelayQueue()
        self._late: dict[_Key, QueuedRequest] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    def count(self, name: IntakeClass) -> int:
        """How many requests of a class are held."""
        return len(self._entries[name])

    def ids(self, name: IntakeClass) -> list[str]:
        """The entries of a class that are held, in their order in the intake."""
        return list(self._entries[name])

    def get(self, name: IntakeClass, entry: str) -> QueuedRequest | None:
        """The request of that entry, if it is held."""
        return self._entries[name].get(entry)

    @property
    def models(self) -> KeysView[str]:
        """Models that requests wait for which could run now."""
        return self._queues.keys()

    @property
    def clients(self) -> int:
        """How many clients compete for the same place, at most."""
        return max((queue.clients for queue in self._queues.values()), default=0)

    def queue(self, model: str) -> ModelQueue | None:
        """What waits for that model and could run now."""
        return self._queues.get(model)

    def add(self, queued: QueuedRequest) -> None:
        """Hold a request until it is placed or answered."""
        entries = self._entries[queued.intake]
        before = entries.get(queued.entry)
        if before is not None:  # read twice: somebody has made the group anew
            self.remove(before)
        entries[queued.entry] = queued
        if queued.deadline_ms is not None:
            self._deadlines.set((queued.intake, queued.entry), queued.deadline_ms)
        if queued.history.not_before_ms:
            self._pauses.set((queued.intake, queued.entry), queued.history.not_before_ms)
        else:
            self._enqueue(queued)

    def remove(self, queued: QueuedRequest, *, is_served: bool = False) -> None:
        """Hold a request no more; nothing happens if it is not held. Served, it has its place."""
        self._entries[queued.intake].pop(queued.entry, None)
        self._dequeue(queued, is_served=is_served)
        if queued.deadline_ms is not None or queued.history.not_before_ms:
            key = (queued.intake, queued.entry)
            self._deadlines.discard(key)
            self._pauses.discard(key)
            self._late.pop(key, None)

    def clear(self) -> None:
        """Hold nothing any more."""
        for entries in self._entries.values():
            entries.clear()
        self._queues.clear()
        self._late.clear()
        self._pauses, self._deadlines = DelayQueue(), DelayQueue()

    def _enqueue(self, queued: QueuedRequest) -> None:
        queue = self._queues.get(queued.model)
        if queue is None:
            queue = self._queues[queued.model] = ModelQueue(self._turn_of)
        queue.add(queued)

    def _dequeue(self, queued: QueuedRequest, *, is_served: bool = False) -> None:
        queue = self._queues.get(queued.model)
        if queue is not None:
            queue.discard(queued, is_served=is_served)
            if not queue:
                del self._queues[queued.model]

    def advance(self, now_ms: float) -> None:
        """Move what has become late out of the queues, and into them what has paused enough."""
        for key in self._deadlines.take_due(now_ms):
            queued = self._entries[key[0]][key[1]]
            self._pauses.discard(key)
            self._dequeue(queued)
            self._late[key] = queued
        for key in self._pauses.take_due(now_ms):
            self._enqueue(self._entries[key[0]][key[1]])

    def late(self, most: int) -> list[QueuedRequest]:
        """Requests whose deadlines have passed, the earliest first."""
        return list(islice(self._late.values(), most))

    @property
    def next_ms(self) -> float | None:
        """When a pause or a deadline ends next; None where there is none."""
        times = [at for at in (self._pauses.next_ms, self._deadlines.next_ms) if at is not None]
        return min(times, default=None)

    def demands(self, now_ms: float) -> list[Demand]:
        """What could run now if it had a lane, by model; of models that the yard knows."""
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
