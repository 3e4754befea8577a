"""A bounded window over an endless list of prompts: what `Client.map` does, without I/O.

At most ``size`` requests are submitted and not yet given back, so memory stays flat whatever
the number of prompts. Replies come from another thread or task; here they meet in one queue.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from tokenyard.client.build import Item, PreparedRequest
from tokenyard.client.pending import PendingRequest, rejected
from tokenyard.protocol.errors import (
    BrokerUnavailable,
    Code,
    DeadlineUnmeetable,
    IdReused,
    InvalidRequest,
)
from tokenyard.protocol.replies import Result

#: Most prompts that are drafted in one go.
_BURST: Final = 256
#: A slow source is not waited for longer than this before what it gave is submitted.
_PATIENCE_S: Final = 0.05

Numbered = tuple[int, PreparedRequest]


class MapWindow:
    """The state of one `map`."""

    def __init__(
        self, items: Iterable[Item], size: int, *, ordered: bool, wake: Callable[[], None]
    ) -> None:
        if size < 1:
            raise ValueError("window: must be at least 1")
        self._items = iter(items)
        self._size = size
        self._ordered = ordered
        self._wake = wake
        self._next_index = 0
        self._next_out = 0
        self._is_exhausted = False
        self._unsubmitted: deque[Numbered] = deque()
        self._closed_until = 0.0  # the intake was full
        self.fault: BrokerUnavailable | None = None  # why the last submission failed
        self._running: dict[int, PendingRequest] = {}
        self._over: deque[tuple[int, PendingRequest]] = deque()  # written by whoever brings replies
        self._results: dict[int, Result] = {}

    @property
    def is_over(self) -> bool:
        """Whether every prompt's result has been given back."""
        return self._is_exhausted and not (self._unsubmitted or self._running or self._results)

    @property
    def running(self) -> list[PendingRequest]:
        """The requests under way."""
        return list(self._running.values())

    @property
    def _room(self) -> int:
        held = len(self._unsubmitted) + len(self._running) + len(self._results)
        return min(self._size - held, _BURST)

    @property
    def has_room(self) -> bool:
        """Whether a burst worth its round trip fits, and there may be more prompts."""
        return not self._is_exhausted and self._room >= min(_BURST, max(1, self._size // 4))

    def pull(self) -> list[Item]:
        """Prompts that there is room for."""
        room = self._room if self.has_room else 0
        items: list[Item] = []
        patience_ends = time.monotonic() + _PATIENCE_S
        for item in itertools.islice(self._items, room):
            items.append(item)
            if time.monotonic() > patience_ends:
                return items
        self._is_exhausted = self._is_exhausted or len(items) < room
        return items

    def add(self, drafts: Sequence[PreparedRequest | InvalidRequest]) -> None:
        """What became of the prompts pulled; a bad one has its result at once."""
        for draft in drafts:
            index = self._next_index
            self._next_index += 1
            if isinstance(draft, InvalidRequest):
                name = f"#{index}"
                self._results[index] = rejected(name, Code.INVALID_REQUEST, str(draft))
            else:
                self._unsubmitted.append((index, draft))

    def take_unsubmitted(self, now: float) -> list[Numbered]:
        """The requests to submit now, which the caller must give to `submitted` or `refuse`."""
        if now < self._closed_until:
            return []
        ready = list(self._unsubmitted)
        self._unsubmitted.clear()
        return ready

    def refuse(self, refused: Iterable[Numbered], retry_at: float) -> None:
        """These found the intake full: keep them until then."""
        self._unsubmitted.extendleft(reversed(list(refused)))
        self._closed_until = retry_at

    def reject(self, refused: Mapping[int, tuple[str, DeadlineUnmeetable | IdReused]]) -> None:
        """These, given with their ids, are not taken later either: that is their result."""
        for index, (name, fault) in refused.items():
            is_reused = isinstance(fault, IdReused)
            code = Code.ID_REUSED if is_reused else Code.DEADLINE_EXCEEDED
            self._results[index] = rejected(name, code, str(fault))

    def submitted(self, index: int, exchange: PendingRequest) -> None:
        """A request is under way, and its result may be there already."""
        self._running[index] = exchange
        exchange.listeners.append(partial(self._note, index))
        if exchange.is_over:
            self._note(index, exchange)

    def _note(self, index: int, exchange: PendingRequest) -> None:
        if exchange.is_over:
            self._over.append((index, exchange))
            self._wake()

    def ready(self) -> Iterator[tuple[int, Result]]:
        """Results to give back now, with the numbers of their prompts.

        Raises what ended a request without a result.
        """
        while self._over:
            index, exchange = self._over.popleft()
            if self._running.pop(index, None) is None:
                continue
            if self._ordered:
                self._results[index] = exchange.result()
            else:
                yield index, exchange.result()
        if not self._ordered:
            while self._results:
                index = next(iter(self._results))
                yield index, self._results.pop(index)
        while self._next_out in self._results:
            index = self._next_out
            self._next_out += 1
            yield index, self._results.pop(index)

    def wait_s(self, now: float, most_s: float) -> float:
        """How long it may wait for news; 0 where there is something to do already."""
        if self._over or self.has_room or self.is_over:
            return 0.0
        if self._unsubmitted:
            return min(most_s, max(0.0, self._closed_until - now))
        return most_s
