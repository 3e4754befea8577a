"""The order in which requests are served: classes by their shares, clients in turn.

Shares are kept by self-clocked fair queueing (Golestani, 1994): the next request of a class is due
``1 / weight`` after the one before it, or after the request that was served last if none of its
class waited; the request that is due first is served first. So an unused class costs the
others nothing, and saves up nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from typing import cast

from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.keys import CLASS_WEIGHTS, PriorityClass, split_intake


class ClassQueue:
    """The requests of one class: clients take turns, and each client's requests keep their order.

    A client goes to the end when it was served, and starts there.
    """

    def __init__(self) -> None:
        # An OrderedDict finds its first item quickly also after thousands before it have left.
        self._clients: OrderedDict[str, OrderedDict[str, QueuedRequest]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All requests, in the order in which they should be served."""
        if len(self._clients) > 1:
            return self._in_turn()
        return chain.from_iterable(requests.values() for requests in self._clients.values())

    def _in_turn(self) -> Iterator[QueuedRequest]:
        left = deque(self._clients.values())
        turns: deque[Iterator[QueuedRequest]] = deque()
        while left or turns:
            requests = iter(left.popleft().values()) if left else turns.popleft()
            queued = next(requests, None)
            if queued is not None:
                yield queued
                turns.append(requests)

    def add(self, queued: QueuedRequest) -> None:
        """Put a request behind those of its client."""
        client = queued.turn
        requests = self._clients.get(client)
        if requests is None:
            requests = self._clients[client] = OrderedDict()
        requests[queued.entry] = queued

    def discard(self, queued: QueuedRequest, *, is_served: bool = False) -> bool:
        """Take a request out; whether it was here. ``is_served`` uses the turn of its client."""
        client = queued.turn
        requests = self._clients.get(client)
        if requests is None or requests.pop(queued.entry, None) is None:
            return False
        if not requests:
            del self._clients[client]
        elif is_served and len(self._clients) > 1:
            self._clients.move_to_end(client)
        return True

    @property
    def clients(self) -> int:
        """How many clients have requests here."""
        return len(self._clients)

    @property
    def since_ms(self) -> float:
        """When the oldest came in, about: the first of the client whose turn it is."""
        return next(iter(next(iter(self._clients.values())).values())).since_ms


class PriorityQueue:
    """The requests of one tenant, or of all that have none: classes by shares, clients in turn."""

    def __init__(self) -> None:
        self._by_intake: dict[str, ClassQueue] = {}  # one for each class; none is empty
        # When the last request of each class was due, and when the last of all was.
        self._served = dict.fromkeys(CLASS_WEIGHTS, 0.0)
        self._now = 0.0

    def __bool__(self) -> bool:
        return bool(self._by_intake)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All requests, in the order in which they should be served."""
        if len(self._by_intake) == 1:
            return iter(next(iter(self._by_intake.values())))
        return self._by_shares()

    def _by_shares(self) -> Iterator[QueuedRequest]:
        """Each class gets its part of `CLASS_WEIGHTS`; nothing changes until one is served."""
        queues = {_class_of(name): queue for name, queue in self._by_intake.items()}
        requests = {name: iter(queues[name]) for name in CLASS_WEIGHTS if name in queues}
        due = {name: self._served[name] + 1 / CLASS_WEIGHTS[name] for name in requests}
        while due:
            name = min(due, key=due.__getitem__)
            queued = next(requests[name], None)
            if queued is None:
                del due[name]
                continue
            yield queued
            due[name] += 1 / CLASS_WEIGHTS[name]

    def add(self, queued: QueuedRequest) -> None:
        """Put a request behind those of its class and client."""
        queue = self._by_intake.get(queued.intake)
        if queue is None:
            name = _class_of(queued.intake)
            self._served[name] = max(self._served[name], self._now)
            queue = self._by_intake[queued.intake] = ClassQueue()
        queue.add(queued)

    def discard(self, queued: QueuedRequest, *, is_served: bool = False) -> bool:
        """Take a request out; whether it was here. ``is_served`` uses its class's turn."""
        queue = self._by_intake.get(queued.intake)
        was_here = queue is not None and queue.discard(queued, is_served=is_served)
        if is_served and len(self._by_intake) > 1:
            name = _class_of(queued.intake)
            self._served[name] += 1 / CLASS_WEIGHTS[name]
            self._now = self._served[name]
        if was_here and not queue:
            del self._by_intake[queued.intake]
        return was_here

    @property
    def clients(self) -> int:
        """How many clients compete, at most: those of the class that has most."""
        return max((queue.clients for queue in self._by_intake.values()), default=0)

    @property
    def since_ms(self) -> float:
        """When the oldest came in, about."""
        return min(queue.since_ms for queue in self._by_intake.values())


def _class_of(intake: str) -> PriorityClass:
    return cast(PriorityClass, split_intake(intake)[0])
