"""Reading the intake.

Entries are read through the consumer group, so that what was read and not yet dispatched stays
pending there and a successor reads it again. What cannot be placed yet is kept in memory, bounded
(`coordinator.dispatch.backlog`); it stays in the intake until `dispatch` moves it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import redis

from coordinator.dispatch.audit import PAGE, PendingReconciler
from coordinator.dispatch.backlog import Backlog
from coordinator.dispatch.entries import Entry, RawEntry, WakeupEvent, pairs
from coordinator.dispatch.shares import TurnOf, by_client
from coordinator.dispatch.tenant_intakes import TenantIntakes
from coordinator.dispatch.tenant_shares import TenantShares
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.broker.direct import ask_all
from tokenyard.protocol.keys import CONSUMER, GROUP, INTAKE_CLASSES, IntakeClass, Keys
from tokenyard.protocol.streams import position

#: Events of arrivals that the broker keeps for a leader at least.
_MOST_ARRIVALS: Final = 1000
#: The year 2286.
FAR_FUTURE_MS = 10**13
#: Requests of each class that are read while the backlog is full and no lane has room, so that
#: the first of every class is known when a lane gets room.
LOOK_AHEAD = 16


class Intake:
    """Reads entries, and keeps the backlog equal to what is pending."""

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        *,
        max_batch: int,
        max_held: int,
        turn_of: TurnOf = by_client,
        shares: TenantShares | None = None,
    ) -> None:
        """The backlog has about ``max_held`` requests at most; ``turn_of``, ``shares`` as there."""
        self.backlog = Backlog(turn_of, shares)
        self.tenants = TenantIntakes(
            connection, keys, self.backlog, max_batch=max_batch, max_held=max_held
        )
        self._connection = connection
        self._keys = keys
        self._max_batch = max_batch
        self._max_held = max_held
        self._names: dict[bytes, IntakeClass] = {
            keys.intake(name).encode(): name for name in INTAKE_CLASSES
        }
        # Classes of which not everything is read that was pending at the start of the term, and
        # the last entry that was.
        self._behind: dict[IntakeClass, str] = {}
        self._audits: dict[IntakeClass, PendingReconciler] = {}
        self._next_audit = 0.0  # not before (monotonic)
        self._is_cancelling = False
        self._unacknowledged: dict[str, list[bytes]] = {}  # events by stream
        # Streams of events of which an earlier leader may have left some pending.
        self._pending_streams: set[str] = set()

    def read(
        self, room: int, block_ms: int, *, with_capacity: bool = True
    ) -> tuple[list[Entry], list[WakeupEvent]]:
        """Entries of each class and events; waits for either.

        While the backlog is not full it reads a batch of each class: only what is in the backlog
        can have its turn by model, class and client. Beyond the bound it reads about ``room`` of
        each class. What was pending when the term began is read before new entries of its class.
        ``with_capacity`` also reads the events of lanes that have room again. Events are
        acknowledged with the next read, which saves a round trip in each turn; they and cancels
        only wake, and a new leader reads the whole yard anyway.
        """
        count, wanted = self._wants(room)
        streams = {self._keys.intake(name): self._behind.get(name, ">") for name in wanted}
        wakes = (self._keys.events, self._keys.arrivals)
        for stream in (*wakes, *([self._keys.capacity] if with_capacity else ())):
            streams[stream] = "0" if stream in self._pending_streams else ">"
        streams[self._keys.cancelling] = ">"
        answer = self._ask(
            "XREADGROUP",
            *("GROUP", GROUP, CONSUMER, "COUNT", count),
            *(("BLOCK", block_ms) if block_ms else ()),
            *("STREAMS", *streams, *streams.values()),
        )
        return self._sort(answer or [], count)

    def _ask(self, *command: str | int) -> Any:
        """Run a command, and acknowledge earlier events in the same round trip."""
        told = self._unacknowledged.items()
        acknowledge = [("XACK", stream, GROUP, *events) for stream, events in told]
        answer = ask_all(self._connection, [*acknowledge, command])[-1]
        self._unacknowledged.clear()
        return answer

    def _wants(self, room: int) -> tuple[int, list[IntakeClass]]:
        """How many entries to read, at most, and of which classes."""
        if len(self.backlog) < self._max_held:
            return self._max_batch, list(INTAKE_CLASSES)
        count = min(max(LOOK_AHEAD, room), self._max_batch)
        return count, [name for name in INTAKE_CLASSES if self.backlog.count(name) < count]

    def _sort(
        self, answer: Sequence[tuple[bytes, Sequence[RawEntry]]], count: int
    ) -> tuple[list[Entry], list[WakeupEvent]]:
        entries: list[Entry] = []
        events: list[WakeupEvent] = []
        for stream, items in answer:
            name = self._names.get(stream)
            if stream == self._keys.cancelling.encode():
                self._connection.xack(self._keys.cancelling, GROUP, *(item[0] for item in items))
                self._is_cancelling = True
                continue
            if name is None:
                self._note_events(stream.decode(), [item for item, _ in items], count)
                events += [WakeupEvent(item.decode(), pairs(values)) for item, values in items]
                continue
            entries += [Entry(name, item.decode(), pairs(values)) for item, values in items]
            if len(items) < count:
                self._behind.pop(name, None)
            elif name in self._behind:
                self._behind[name] = entries[-1].id
        return entries, events

    def _note_events(self, stream: str, events: list[bytes], count: int) -> None:
        """Note events to acknowledge, and whether all that an earlier leader had are read."""
        if events:
            self._unacknowledged.setdefault(stream, []).extend(events)
        if len(events) < count:
            self._pending_streams.discard(stream)
        if stream == self._keys.arrivals and len(events) >= min(count, _MOST_ARRIVALS):
            self.tenants.miss()
        is_spoilt = events and position(events[-1].decode())[0] >= FAR_FUTURE_MS
        if is_spoilt and stream == self._keys.arrivals:
            self._connection.delete(stream)  # the next read finds it missing, and it is made again

    def take_cancelling(self) -> bool:
        """Whether clients have requested cancels since the last call; see `CancelRequests`."""
        is_cancelling, self._is_cancelling = self._is_cancelling, False
        return is_cancelling

    def read_again(self) -> None:
        """Clear the backlog: all of it is pending, and is read from there."""
        self.backlog.clear()
        self.tenants.begin()
        self._audits.clear()
        self._behind = dict.fromkeys(INTAKE_CLASSES, "0")
        self._pending_streams = {self._keys.events, self._keys.arrivals, self._keys.capacity}

    @property
    def is_auditing(self) -> bool:
        """Whether the backlog is being compared with what is pending."""
        return bool(self._audits)

    def compare(self) -> None:
        """Count what is pending, and correct the backlog where it differs.

        A leader that loses the lead while it reads takes entries that it may not move any more.
        They are pending like those of the backlog, and no read would return them again. On the
        other hand, a cancelled request is no longer pending.
        """
        may_audit = time.monotonic() >= self._next_audit
        names = [name for name in INTAKE_CLASSES if name not in self._behind]
        pipeline = self._connection.pipeline(transaction=False)
        for name in names:
            pipeline.xpending(self._keys.intake(name), GROUP)
        pipeline.zcard(self._keys.line)
        *summaries, in_line = pipeline.execute()
        self.tenants.refresh(in_line)
        for name, summary in zip(names, summaries, strict=True):
            pending, count = summary["pending"], self.backlog.count(name)
            if pending > count:
                self.read_again()
                return
            if pending < count and name not in self._audits and may_audit:
                self._audits[name] = PendingReconciler(self.backlog.ids(name))

    def gone(self) -> list[QueuedRequest]:
        """Requests of the backlog that are not pending any more: a page of each audit."""
        found: list[QueuedRequest | None] = []
        for name, audit in list(self._audits.items()):
            page: Any = self._connection.xpending_range(
                self._keys.intake(name), GROUP, min=audit.after, max="+", count=PAGE
            )
            pending = [item["message_id"].decode() for item in page]
            found += [self.backlog.get(name, entry) for entry in audit.compare(pending)]
            if audit.is_over:
                del self._audits[name]
                self._next_audit = audit.rests_until()
        return [queued for queued in found if queued] + self.tenants.gone()
