"""The lanes of one model in the order of their names, with an index of those with room.

There may be a thousand of them, and each request changes one: the cost of a request must not grow
with their number, so only `__iter__` and `__init__` walk over them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

from coordinator.routing.policies import Lane


def in_turn(lane: Lane) -> tuple[str, str]:
    """The sort key: the name, and the older of two incarnations first."""
    return lane.name, lane.worker


class Lanes(Sequence[Lane]):
    """Lanes of one model; the set of workers is fixed, their loads change."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self._lanes = sorted(lanes, key=in_turn)
        self._names = [lane.name for lane in self._lanes]
        self._places = {lane.worker: at for at, lane in enumerate(self._lanes)}
        self._open = [at for at, lane in enumerate(self._lanes) if lane.is_open]  # ascending
        self.room = sum(lane.room for lane in self._lanes)  # how many more requests fit

    def copy(self) -> Self:
        """The same lanes, to plan with."""
        twin = object.__new__(type(self))  # every turn does this, and `copy.copy` is slow
        vars(twin).update(vars(self), _lanes=self._lanes.copy(), _open=self._open.copy())
        return twin

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @overload
    def __getitem__(self, at: int) -> Lane: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Lane]: ...
    def __getitem__(self, at: int | slice) -> Lane | Sequence[Lane]:
        return self._lanes[at]

    def put(self, lane: Lane) -> None:
        """Replace a lane that has changed."""
        at = self._places[lane.worker]
        before, self._lanes[at] = self._lanes[at], lane
        room, room_before = lane.room, before.room
        self.room += room - room_before
        if (room > 0) == (room_before > 0):
            return
        if room:
            insort(self._open, at)
        else:
            del self._open[bisect_left(self._open, at)]

    def next_open(self, last: str) -> Lane | None:
        """The next lane with room behind the worker named ``last``, in the order of names."""
        if not self._open:
            return None
        at = bisect_left(self._open, bisect_right(self._names, last))
        return self._lanes[self._open[at % len(self._open)]]

    def has(self, name: str) -> bool:
        """Whether a worker of that name is there, even with a full lane."""
        at = bisect_left(self._names, name)
        return at < len(self._names) and self._names[at] == name

    def named(self, name: str) -> Lane | None:
        """The lane with room of the worker of that name; None while it is absent or full."""
        first, end = bisect_left(self._names, name), bisect_right(self._names, name)
        return next((lane for lane in self._lanes[first:end] if lane.is_open), None)
