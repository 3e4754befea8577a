"""A bounded window over any number of prompts, for `Client.map`; without I/O.

At most ``size`` requests are held at once, so memory use does not depend on the number of prompts.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from tokenyard import clock
from tokenyard.client.build import PreparedRequest
from tokenyard.client.options import Item
from tokenyard.client.pending import MAX_SLEEP_S, PendingRequest
from tokenyard.protocol import errors
from tokenyard.protocol.replies import ErrorInfo, Result, split_result, status_of

#: Most prompts that are prepared in one call.
_BURST: Final = 256
#: After this long, the prompts that a slow source has yielded are submitted.
_PULL_S: Final = 0.05
_CODES: Final[Mapping[type, errors.Code]] = {
    errors.DeadlineUnmeetable: errors.Code.DEADLINE_EXCEEDED,
    errors.IdReused: errors.Code.ID_REUSED,
    errors.InvalidRequest: errors.Code.INVALID_REQUEST,
    errors.QuotaExceeded: errors.Code.QUOTA_EXCEEDED,
}

Numbered = tuple[int, PreparedRequest]


class MapWindow:
    """The state of one `map`."""

    def __init__(
        self,
        items: Iterable[Item],
        size: int,
        *,
        ordered: bool,
        wake: Callable[[], None],
        timeout_s: float,
        patience_s: float = math.inf,
    ) -> None:
        if size < 1:
            raise ValueError("window: must be at least 1")
        self._items = iter(items)
        self._size = size
        self._ordered = ordered
        self._wake = wake
        self._timeout_s = timeout_s
        #: When it is stuck; None after progress, until the next wait.
        self._give_up: float | None = clock.monotonic() + timeout_s
        self._next_index = 0
        self._next_out = 0
        self._is_exhausted = False
        self._unsubmitted: deque[Numbered] = deque()
        self._retry_at = 0.0  # the queue was full
        #: The longest that it waits for a limit while it has no other request to wait for.
        self.patience_s = patience_s
        self.error: errors.BrokerUnavailable | None = None  # why the last submission failed
        self._running: dict[int, PendingRequest] = {}
        # The latest index of each; an earlier one of the same request, by the later one.
        self._indexes: dict[PendingRequest, int] = {}
        self._earlier: dict[int, int] = {}
        self._over: deque[PendingRequest] = deque()  # appended by the thread that reads replies
        self._listener = self._note  # one object for all requests
        self._results: dict[int, Result] = {}
        self._packed: dict[int, int] = {}  # items in one request, by the index of the first

    @property
    def is_over(self) -> bool:
        """Whether the result of every prompt was returned."""
        return self._is_exhausted and not (self._unsubmitted or self._running or self._results)

    @property
    def running(self) -> list[PendingRequest]:
        """The submitted requests without a result."""
        return list(self._running.values())

    @property
    def _room(self) -> int:
        requests = len(self._unsubmitted) + len(self._running)
        held = requests - len(self._packed) + sum(self._packed.values()) + len(self._results)
        return min(self._size - held, _BURST)

    @property
    def has_room(self) -> bool:
        """Whether there may be more prompts, and room for enough to be worth a round trip."""
        return not self._is_exhausted and self._room >= min(_BURST, max(1, self._size // 4))

    def pull(self) -> list[Item]:
        """The next prompts, as many as there is room for."""
        room = self._room if self.has_room else 0
        items: list[Item] = []
        stop_at = clock.monotonic() + _PULL_S
        for item in itertools.islice(self._items, room):
            items.append(item)
            if clock.monotonic() > stop_at:
                return items
        self._is_exhausted = self._is_exhausted or len(items) < room
        return items

    def add(self, prepared: Sequence[PreparedRequest | errors.InvalidRequest]) -> None:
        """Add the prompts that were pulled; an invalid one has its result immediately."""
        for one in prepared:
            index = self._next_index
            if isinstance(one, errors.InvalidRequest):
                self._next_index += 1
                self.reject(index, f"#{index}", one)
                continue
            self._next_index += max(1, one.packed)
            if one.packed:
                self._packed[index] = one.packed
            self._unsubmitted.append((index, one))

    def take_unsubmitted(self, now: float) -> list[Numbered]:
        """The requests to submit now; pass each to `submitted`, `reject` or `postpone`."""
        if now < self._retry_at:
            return []
        ready = list(self._unsubmitted)
        self._unsubmitted.clear()
        return ready

    def postpone(self, requests: Iterable[Numbered], retry_at: float) -> None:
        """Keep requests that found the queue full until ``retry_at``."""
        self._unsubmitted.extendleft(reversed(list(requests)))
        self._retry_at = retry_at

    def reject(self, index: int, request_id: str, error: errors.TokenyardError) -> None:
        """Give a request that would be refused again the error as its result."""
        code = _CODES[type(error)]
        whole = Result(
            id=request_id, status=status_of(code), tokens=[], error=ErrorInfo(code, str(error))
        )
        self._results.update(self._of_items(index, whole))

    def submitted(self, index: int, pending: PendingRequest) -> None:
        """Follow a submitted request, which may have its result already."""
        self._give_up = None
        self._running[index] = pending
        earlier = self._indexes.get(pending)
        if earlier is None:
            pending.listeners.append(self._listener)
        else:
            self._earlier[index] = earlier
        self._indexes[pending] = index
        self._note(pending)

    def _note(self, pending: PendingRequest) -> None:
        if pending.is_over:
            self._over.append(pending)
            self._wake()

    def ready(self) -> Iterator[tuple[int, Result]]:
        """Results to return now, with the indexes of their prompts.

        Raises the error of a request that has ended without a result.
        """
        while self._over:
            pending = self._over.popleft()
            index = self._indexes.pop(pending, None)
            while index is not None:
                del self._running[index]
                earlier = self._earlier.pop(index, None)
                for item in self._of_items(index, pending.result()):
                    if self._ordered:
                        self._results.update([item])
                    else:
                        yield item
                        self._give_up = None
                index = earlier
        if not self._ordered:
            while self._results:
                index = next(iter(self._results))
                yield index, self._results.pop(index)
                self._give_up = None
        while self._next_out in self._results:
            index = self._next_out
            self._next_out += 1
            yield index, self._results.pop(index)
            self._give_up = None

    def _of_items(self, index: int, result: Result) -> Iterator[tuple[int, Result]]:
        """The results of the items in the request at an index."""
        count = self._packed.pop(index, 0)
        return enumerate(split_result(result, count) if count else [result], index)

    @property
    def is_stuck(self) -> bool:
        """Whether nothing was accepted, and no result returned, within the time-out."""
        return self._give_up is not None and clock.monotonic() >= self._give_up

    def wait_s(self) -> float:
        """How long to wait for updates; 0 where there is something to do now."""
        now = clock.monotonic()
        if self._give_up is None:
            self._give_up = now + self._timeout_s
        if self._over or self.has_room or self.is_over:
            return 0.0
        until = min(self._retry_at, self._give_up) if self._unsubmitted else self._give_up
        return min(max(0.0, until - now), MAX_SLEEP_S)
