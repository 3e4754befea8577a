"""What was read of the streams of tenants, and what to read next.

These intakes have no consumer group: an entry is there until it was dispatched or answered, and
what was read is known by its id. So nothing is lost if what was read is forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final

from msgspec import Struct

from coordinator.dispatch.backlog import Backlog
from coordinator.dispatch.entries import BEGIN, Entry, pairs
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.keys import PRIORITY_CLASSES, Keys, intake_name, split_intake

#: Requests of each intake that are read at least: with a page of tenants about a batch.
LOOK_AHEAD: Final = 4

Command = tuple[str | int, ...]


class Slice(Struct, frozen=True):
    """A part of an intake, to read."""

    intake: str
    after: str
    count: int


class TenantStreams:
    """Up to where each was read; the entries themselves are in the backlog."""

    def __init__(self, keys: Keys, backlog: Backlog, *, max_batch: int, max_held: int) -> None:
        """``max_batch`` and ``max_held`` as for the `Intake`."""
        self._keys = keys
        self._backlog = backlog
        self._max_batch = max_batch
        self._max_held = max_held
        self._after: dict[str, str] = {}  # last entry read, by intake
        self._exhausted: set[str] = set()  # of which everything was read

    def clear(self) -> None:
        """Forget everything, as in a new term."""
        self._after.clear()
        self._exhausted.clear()

    def wake(self, intake: str) -> None:
        """A request came into an intake."""
        self._exhausted.discard(intake)

    def doubt(self, tenants: Iterable[str] | None = None) -> None:
        """Events may have been lost: these tenants, or all, may have something new."""
        if tenants is None:
            self._exhausted.clear()
        else:
            self._exhausted.difference_update(*map(intakes_of, tenants))

    def begin_lap(self) -> list[str]:
        """Keep what is known of the intakes with requests in the backlog; returns these."""
        held = self._backlog.intakes
        self._exhausted.clear()
        self._after = {intake: at for intake, at in self._after.items() if intake in held}
        return [intake for intake in held if split_intake(intake)[1]]

    def forget(self, intake: str) -> list[QueuedRequest]:
        """Read all of an intake again; returns what was known of it."""
        self._exhausted.discard(intake)
        self._after.pop(intake, None)
        found = (self._backlog.get(intake, entry) for entry in self._backlog.ids(intake))
        return [queued for queued in found if queued]

    def is_exhausted(self, tenant: str) -> bool:
        """Whether all that a tenant has waiting was read."""
        return self._exhausted.issuperset(intakes_of(tenant))

    def wanted(
        self, names: Iterable[str], urgent: Container[str], in_line: int, depth: int = 1
    ) -> list[Slice]:
        """What to read of tenants, ``depth`` times as much of each as all could have held.

        Where there is no room in the backlog, only of the ``urgent`` ones of whom nothing is known.
        An intake of which enough is held is read again when half of that has left; of what is not
        needed soon, no more than a batch.
        """
        has_room = len(self._backlog) < self._max_held
        most = max(LOOK_AHEAD, self._max_held // in_line) * depth if has_room else LOOK_AHEAD
        exhausted, count = self._exhausted, self._backlog.count
        open_: list[tuple[str, int]] = []
        for name in names:
            intakes = intakes_of(name)
            held = [(intake, count(intake)) for intake in intakes]
            if not any(number for _, number in held):
                if exhausted.issuperset(intakes):  # somebody has come since, whose event was lost
                    exhausted.difference_update(intakes)
                if not has_room and name not in urgent:
                    continue
            elif not has_room:
                continue
            open_ += [pair for pair in held if pair[0] not in exhausted and 2 * pair[1] <= most]
        share, spare = max(LOOK_AHEAD, self._max_batch // max(1, len(open_))), self._max_batch
        found: list[Slice] = []
        for intake, number in open_:
            size = min(share, most - number)
            if 2 * number > LOOK_AHEAD:
                if spare <= 0:
                    continue
                spare -= size
            after = self._after.get(intake, BEGIN) if number else BEGIN
            found.append(Slice(intake, after, size))
        return found

    def commands(self, parts: Iterable[Slice]) -> list[Command]:
        """Commands that read these; what is empty is not in their answers."""
        by_count: dict[int, list[Slice]] = {}
        for one in parts:
            by_count.setdefault(one.count, []).append(one)
        return [
            (
                *("XREAD", "COUNT", count, "STREAMS"),
                *(self._keys.intake(one.intake) for one in group),
                *(one.after for one in group),
            )
            for count, group in by_count.items()
        ]

    def take(self, parts: Iterable[Slice], answers: Iterable[Any]) -> tuple[list[Entry], set[str]]:
        """The entries that are new, and the intakes that have none."""
        streams = {key: items for answer in answers for key, items in answer or ()}
        entries: list[Entry] = []
        empty: set[str] = set()
        for one in parts:
            items = streams.get(self._keys.intake(one.intake).encode(), ())
            found = [Entry(one.intake, item.decode(), pairs(values)) for item, values in items]
            if found:
                self._after[one.intake] = found[-1].id
            elif one.after == BEGIN:
                empty.add(one.intake)
            if len(found) < one.count:
                self._exhausted.add(one.intake)
            entries += [each for each in found if not self._backlog.get(one.intake, each.id)]
        return entries, empty


@functools.lru_cache(4096)  # asked for several times in a turn
def intakes_of(tenant: str) -> Sequence[str]:
    """The names of a tenant's intakes."""
    return [intake_name(name, tenant) for name in PRIORITY_CLASSES]
