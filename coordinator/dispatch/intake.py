"""Reading the intake.

Entries are read through the consumer group, so that what was read and not yet handed over stays
pending there and a successor reads it again. What cannot be placed yet is held in memory,
bounded (`coordinator.dispatch.backlog`); it stays in the intake until `dispatch` moves it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis
from msgspec import Struct

from coordinator.dispatch.audit import PAGE, PendingReconciler
from coordinator.dispatch.backlog import Backlog
from coordinator.dispatch.shares import TurnOf, by_client
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.keys import CONSUMER, GROUP, INTAKE_CLASSES, IntakeClass, Keys

#: Requests of each class that are read where more wait than may be held and no lane has room, so
#: that the first of every class is known when a place becomes free.
LOOK_AHEAD = 16

_Fields = Mapping[bytes, bytes]


class Entry(Struct, frozen=True):
    """An entry of the intake as it was read."""

    intake: IntakeClass
    id: str
    fields: _Fields


class WakeupEvent(Struct, frozen=True):
    """A wake-up as it was read."""

    id: str
    fields: _Fields


class Intake:
    """Reads entries, and sees that what is held is what is pending."""

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        *,
        max_batch: int,
        max_held: int,
        turn_of: TurnOf = by_client,
    ) -> None:
        """Hold about ``max_held`` requests at most; ``turn_of`` as in `backlog`."""
        self.backlog = Backlog(turn_of)
        self._connection = connection
        self._keys = keys
        self._max_batch = max_batch
        self._max_held = max_held
        self._names: dict[bytes, IntakeClass] = {
            keys.intake(name).encode(): name for name in INTAKE_CLASSES
        }
        # Classes of which not all is read that was pending when we began, and behind which entry
        # to go on.
        self._behind: dict[IntakeClass, str] = {}
        self._audits: dict[IntakeClass, PendingReconciler] = {}
        self._next_audit = 0.0  # not before (monotonic)
        self._is_wished = False
        self._heard: dict[str, list[bytes]] = {}  # events to acknowledge, by stream
        # Streams of events of which some may be pending that a leader before has read.
        self._missed: set[str] = set()

    def read(
        self, room: int, block_ms: int, *, places: bool = True
    ) -> tuple[list[Entry], list[WakeupEvent]]:
        """Entries of each class and events; waits for either.

        A batch of each class, turn by turn, until all that waits is held: only so can models,
        classes and clients have their turns. Beyond the bound about ``room`` of each class. What
        was pending when a term began is read before anything new of its class. With ``places`` it
        also hears of those that became free on lanes. Events are acknowledged with the next read,
        which spares a round trip in each turn; they and cancels only wake, and whoever takes over
        reads the yard anew.
        """
        count, wanted = self._wants(room)
        streams = {self._keys.intake(name): self._behind.get(name, ">") for name in wanted}
        for stream in (self._keys.events, *([self._keys.capacity] if places else ())):
            streams[stream] = "0" if stream in self._missed else ">"
        streams[self._keys.cancelling] = ">"
        answer = self._ask(
            "XREADGROUP",
            *("GROUP", GROUP, CONSUMER, "COUNT", count),
            *(("BLOCK", block_ms) if block_ms else ()),
            *("STREAMS", *streams, *streams.values()),
        )
        return self._sort(answer or [], count)

    def _ask(self, *command: str | int) -> Any:
        """Give a command, and acknowledge the events before it."""
        run: Any = self._connection  # redis-py gives no types for commands by name
        if not self._heard:
            return run.execute_command(*command)
        with run.pipeline(transaction=False) as pipeline:
            for stream, events in self._heard.items():
                pipeline.execute_command("XACK", stream, GROUP, *events)
            pipeline.execute_command(*command)
            answer = pipeline.execute()[-1]
        self._heard.clear()
        return answer

    def _wants(self, room: int) -> tuple[int, list[IntakeClass]]:
        """How many entries to read, at most, and of which classes."""
        if len(self.backlog) < self._max_held:
            return self._max_batch, list(INTAKE_CLASSES)
        count = min(max(LOOK_AHEAD, room), self._max_batch)
        return count, [name for name in INTAKE_CLASSES if self.backlog.count(name) < count]

    def _sort(
        self, answer: Sequence[tuple[bytes, Sequence[tuple[bytes, _Fields]]]], count: int
    ) -> tuple[list[Entry], list[WakeupEvent]]:
        entries: list[Entry] = []
        events: list[WakeupEvent] = []
        for stream, items in answer:
            name = self._names.get(stream)
            if stream == self._keys.cancelling.encode():
                self._connection.xack(self._keys.cancelling, GROUP, *(item[0] for item in items))
                self._is_wished = True
                continue
            if name is None:
                self._hear(stream.decode(), [item for item, _ in items], count)
                events += [WakeupEvent(item.decode(), fields or {}) for item, fields in items]
                continue
            entries += [Entry(name, item.decode(), fields or {}) for item, fields in items]
            if len(items) < count:
                self._behind.pop(name, None)
            elif name in self._behind:
                self._behind[name] = entries[-1].id
        return entries, events

    def _hear(self, stream: str, events: list[bytes], count: int) -> None:
        """Note what is to be acknowledged, and whether all is read that a leader before had."""
        if events:
            self._heard.setdefault(stream, []).extend(events)
        if len(events) < count:
            self._missed.discard(stream)

    def take_wished(self) -> bool:
        """Whether clients have wished for a cancel since this was asked; see `CancelRequests`."""
        is_wished, self._is_wished = self._is_wished, False
        return is_wished

    def read_again(self) -> None:
        """Drop what is held: it is pending, and read from there."""
        self.backlog.clear()
        self._audits.clear()
        self._behind = dict.fromkeys(INTAKE_CLASSES, "0")
        self._missed = {self._keys.events, self._keys.capacity}

    @property
    def is_auditing(self) -> bool:
        """Whether what is held is being compared with what is pending."""
        return bool(self._audits)

    def compare(self) -> None:
        """Count what is pending, and set right what differs from what is held.

        A leader that is deposed while it reads takes entries that it may not move any more.
        They are pending like those held here, and nobody would be given them again. On the other
        hand, what is cancelled is pending no more.
        """
        may_audit = time.monotonic() >= self._next_audit
        names = [name for name in INTAKE_CLASSES if name not in self._behind]
        pipeline = self._connection.pipeline(transaction=False)
        for name in names:
            pipeline.xpending(self._keys.intake(name), GROUP)
        for name, summary in zip(names, pipeline.execute(), strict=True):
            pending, backlog = summary["pending"], self.backlog.count(name)
            if pending > backlog:
                self.read_again()
                return
            if pending < backlog and name not in self._audits and may_audit:
                self._audits[name] = PendingReconciler(self.backlog.ids(name))

    def gone(self) -> list[QueuedRequest]:
        """Requests found to wait no more, though they are held: a page of each audit."""
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
        return [queued for queued in found if queued]
