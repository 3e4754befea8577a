"""Reading the intake.

An entry is in its intake until it was dispatched or answered, and only this leader knows what it
has read, by the last id of each stream. So whoever reads takes nothing from anybody, and a
successor begins with the first entry. What cannot be placed yet is kept in memory, bounded
(`coordinator.dispatch.backlog`); it stays in the intake until `dispatch` moves it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from coordinator.dispatch.backlog import Backlog
from coordinator.dispatch.entries import BEGIN, Entry, Fields, RawEntry, pairs
from coordinator.dispatch.tenant_intakes import TenantIntakes
from coordinator.dispatch.tenant_shares import TenantShares
from coordinator.routing.queued_request import QueuedRequest
from tokenyard import clock
from tokenyard.broker.direct import ask_all
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass, Yard
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.streams import FAR_FUTURE_MS, position

#: Entries of a page. It has whole requests, so no more than a turn reads anyway.
PAGE = 100
#: After an audit there is no other for so many times its duration: 2 % of the leader's time, for as
#: long as more wait than may be in the backlog.
REST = 49

#: Events of arrivals that the broker keeps for a leader at least.
_MOST_ARRIVALS: Final = 1000
#: Requests of each class that are read while the backlog is full and no lane has room, so that
#: the first of every class is known when a lane gets room.
LOOK_AHEAD = 16


class Intake:
    """Reads entries, and keeps the backlog equal to what waits, as far as it was read."""

    def __init__(self, yard: Yard, settings: CoordinatorSettings) -> None:
        self.backlog = Backlog(
            TenantShares(
                input_weight=settings.input_token_weight, output_weight=settings.output_token_weight
            )
        )
        self.tenants = TenantIntakes(yard, self.backlog, settings)
        self._yard = yard
        self._max_batch = settings.max_batch
        self._max_held = settings.max_held
        self._names: dict[bytes, IntakeClass] = {
            yard.keys.intake(name).encode(): name for name in INTAKE_CLASSES
        }
        self._after: dict[str, str] = {}  # the last entry read, by stream
        # Clients may write an id of the far future, with which these are deleted; it is not kept.
        self._spoilable = (yard.keys.arrivals, yard.keys.cancelling)
        self._audits: dict[IntakeClass, BacklogReconciler] = {}
        self._next_audit = 0.0  # not before (monotonic)
        #: Whether the last read had requests for cancels by clients; see `CancelRequests`.
        self.is_cancelling = False

    def read(
        self, room: int, block_ms: int, *, with_capacity: bool = True
    ) -> tuple[list[Entry], list[tuple[str, Fields]]]:
        """New entries of each class, and events by their ids; waits for either.

        While the backlog is not full it reads a batch of each class: only what is in the backlog
        can have its turn by model, class and client. Beyond the bound it reads about ``room`` of
        each class. ``with_capacity`` also reads the events of lanes that have room again. Events
        and cancels only wake: a new leader reads the whole yard anyway.
        """
        count, wanted = self._wants(room)
        keys = self._yard.keys
        streams = [*map(keys.intake, wanted), keys.events, keys.arrivals, keys.cancelling]
        if with_capacity:
            streams.append(keys.capacity)
        command = (
            *("XREAD", "COUNT", count),
            *(("BLOCK", block_ms) if block_ms else ()),
            *("STREAMS", *streams, *(self._after.get(stream, BEGIN) for stream in streams)),
        )
        (answer,) = ask_all(self._yard.connection, [command])
        return self._sort(answer or [], count)

    def _wants(self, room: int) -> tuple[int, list[IntakeClass]]:
        """How many entries to read, at most, and of which classes."""
        if len(self.backlog) < self._max_held:
            return self._max_batch, list(INTAKE_CLASSES)
        count = min(max(LOOK_AHEAD, room), self._max_batch)
        return count, [name for name in INTAKE_CLASSES if self.backlog.count(name) < count]

    def _sort(
        self, answer: Sequence[tuple[bytes, Sequence[RawEntry]]], count: int
    ) -> tuple[list[Entry], list[tuple[str, Fields]]]:
        entries: list[Entry] = []
        events: list[tuple[str, Fields]] = []
        self.is_cancelling = False
        for stream, items in answer:
            key, ids = stream.decode(), [item.decode() for item, _ in items]
            if key not in self._spoilable or position(ids[-1])[0] < FAR_FUTURE_MS:
                self._after[key] = ids[-1]
            if name := self._names.get(stream):
                entries += [
                    Entry(name, entry, pairs(values))
                    for entry, (_, values) in zip(ids, items, strict=True)
                    if not self.backlog.get(name, entry)  # read again, see `compare`
                ]
            elif key == self._yard.keys.cancelling:
                self.is_cancelling = True
            else:
                if key == self._yard.keys.arrivals:
                    self._note_arrivals(ids, count)
                events += zip(ids, (pairs(values) for _, values in items), strict=True)
        return entries, events

    def _note_arrivals(self, ids: Sequence[str], count: int) -> None:
        """Note that some may have been lost, and remove ids that permit no further ones."""
        if len(ids) >= min(count, _MOST_ARRIVALS):
            self.tenants.miss()
        if position(ids[-1])[0] >= FAR_FUTURE_MS:
            self._yard.connection.delete(self._yard.keys.arrivals)

    def read_again(self) -> None:
        """Clear the backlog: all of it waits, and is read from there."""
        self.backlog.clear()
        self.tenants.begin()
        self._audits.clear()
        self._after.clear()

    @property
    def is_auditing(self) -> bool:
        """Whether the backlog is being compared with what waits."""
        return bool(self._audits)

    def compare(self) -> None:
        """Count what waits, and correct the backlog where it differs.

        A cancelled request does not wait any more: an audit finds it. On the other hand entries may
        lie before those that were read, where somebody has deleted a stream and its ids began
        again: then its first entry is not known, and all are read again.
        """
        may_audit = clock.monotonic() >= self._next_audit
        ask = [("XLEN", self._yard.keys.intake(name)) for name in INTAKE_CLASSES]
        ask.append(("ZCARD", self._yard.keys.line))
        *lengths, in_line = ask_all(self._yard.connection, ask)
        self.tenants.refresh(in_line)
        for name, length in zip(INTAKE_CLASSES, lengths, strict=True):
            count = self.backlog.count(name)
            if length > count and self._has_passed_over(name):
                del self._after[self._yard.keys.intake(name)]
            if length != count and count and name not in self._audits and may_audit:
                self._audits[name] = BacklogReconciler(self.backlog.ids(name))

    def _has_passed_over(self, name: IntakeClass) -> bool:
        """Whether an intake begins with an entry that is not known, though later ones were read."""
        intake = self._yard.keys.intake(name)
        if intake not in self._after:
            return False
        first: Any = self._yard.connection.xrange(intake, count=1)
        ids = [entry.decode() for entry, _ in first if not self.backlog.get(name, entry.decode())]
        return bool(ids) and position(ids[0]) <= position(self._after[intake])

    def gone(self) -> list[QueuedRequest]:
        """Requests of the backlog that do not wait any more: a page of each audit."""
        found: list[QueuedRequest | None] = []
        for name, audit in list(self._audits.items()):
            page: Any = self._yard.connection.xrange(
                self._yard.keys.intake(name), min=audit.after, max=audit.last, count=PAGE
            )
            found += [
                self.backlog.get(name, entry)
                for entry in audit.compare([entry.decode() for entry, _ in page])
            ]
            if audit.is_over:
                del self._audits[name]
                self._next_audit = audit.rests_until()
        return [queued for queued in found if queued] + self.tenants.gone()


class BacklogReconciler:
    """Compares the entries of one class with what waits, a page in a turn."""

    def __init__(self, entries: Iterable[str]) -> None:
        ids = sorted(entries, key=position)  # read again they may be in another order
        self.after = "-"  # start of the next page, as XRANGE understands it
        self.last = ids[-1] if ids else "-"  # where the last page ends
        self._left = iter(ids)
        self._next = next(self._left, None)
        self._began = clock.monotonic()

    def rests_until(self) -> float:
        """When the next audit may begin (monotonic), if this one ends now."""
        now = clock.monotonic()
        return now + REST * (now - self._began)

    @property
    def is_over(self) -> bool:
        """Whether all entries were compared."""
        return self._next is None

    def compare(self, waiting: Sequence[str]) -> list[str]:
        """Entries of the backlog that do not wait any more, up to the end of a page of `PAGE`.

        A page that is not full is the last one.
        """
        is_last = len(waiting) < PAGE
        end = (math.inf, 0) if is_last else position(waiting[-1])
        known, gone = set(waiting), []
        while self._next is not None and position(self._next) <= end:
            if self._next not in known:
                gone.append(self._next)
            self._next = next(self._left, None)
        if waiting:
            self.after = f"({waiting[-1]}"
        return gone
