"""Reading the intake: waiting requests in the order in which they should be served.

Entries are read through the consumer group, so that what was read and not yet handed over stays
pending there and a successor reads it again. What cannot be placed yet is held here, in memory,
bounded; it stays in the intake until `dispatch` moves it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from coordinator.history import FRESH, History
from tokenyard.keys import CONSUMER, GROUP, INTAKE_CLASSES, IntakeClass, Keys
from tokenyard.wire import Request

#: Every so many placements the classes are served from the lowest up, so that a steady stream
#: of high priority cannot starve the rest.
FAIR_TURN = 16

#: Requests of each class that are read ahead where no lane has room, so that the first of every
#: class is known when a place becomes free, and bad input is answered meanwhile.
LOOK_AHEAD = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the intake as it was read."""

    intake: IntakeClass
    id: str
    fields: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Event:
    """A wake-up as it was read."""

    id: str
    fields: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A valid request that waits for a lane."""

    intake: IntakeClass
    entry: str
    request: Request
    history: History = FRESH
    is_suspect: bool = False  # must run alone
    published: bytes = b""  # packed tokens that its readers have seen


class Intake:
    """Reads entries and holds the requests among them until they are placed."""

    def __init__(self, connection: redis.Redis, keys: Keys, most_held: int) -> None:
        self.held: dict[IntakeClass, deque[Waiting]] = {name: deque() for name in INTAKE_CLASSES}
        self._connection = connection
        self._keys = keys
        self._most_held = most_held
        self._streams: dict[bytes, IntakeClass] = {
            keys.intake(name).encode(): name for name in INTAKE_CLASSES
        }

    def read(self, room: int, block_ms: int) -> tuple[list[Entry], list[Event]]:
        """New entries, about ``room`` of each class, and events; waits for either.

        Events are acknowledged at once: they only wake, and whoever takes over reads the yard
        anew.
        """
        count = min(max(LOOK_AHEAD, room), self._most_held)
        wanted = [name for name, held in self.held.items() if len(held) < count]
        streams: dict[Any, Any] = {self._keys.intake(name): ">" for name in wanted}
        streams[self._keys.events] = ">"
        answer: Any = self._connection.xreadgroup(
            GROUP, CONSUMER, streams, count=count, block=block_ms or None
        )
        return self._sort(answer or [])

    def read_pending(self) -> list[Entry]:
        """What an earlier leader, or this one before it lost its connection, had read."""
        pending: list[Entry] = []
        for stream in self._streams:
            after = b"0"
            while True:
                answer: Any = self._connection.xreadgroup(
                    GROUP, CONSUMER, {stream: after}, count=self._most_held
                )
                entries, _ = self._sort(answer or [])
                if not entries:
                    break
                pending += entries
                after = entries[-1].id.encode()
        return pending

    def has_strays(self) -> bool:
        """Whether more has been read than is held here.

        A leader that is deposed while it reads takes entries that it may not move any more.
        They are pending like those held here, and nobody would be given them again.
        """
        pipeline = self._connection.pipeline(transaction=False)
        for name in self.held:
            pipeline.xpending(self._keys.intake(name), GROUP)
        held = [len(held) for held in self.held.values()]
        return [summary["pending"] for summary in pipeline.execute()] != held

    def _sort(
        self, answer: Sequence[tuple[bytes, Sequence[tuple[bytes, Mapping[bytes, bytes]]]]]
    ) -> tuple[list[Entry], list[Event]]:
        entries: list[Entry] = []
        events: list[Event] = []
        for stream, items in answer:
            name = self._streams.get(stream)
            if name is None:
                self._connection.xack(self._keys.events, GROUP, *(item[0] for item in items))
                events += [Event(item.decode(), fields or {}) for item, fields in items]
            else:
                entries += [Entry(name, item.decode(), fields or {}) for item, fields in items]
        return entries, events

    @property
    def holds_any(self) -> bool:
        """Whether any request is held."""
        return any(self.held.values())

    def hold(self, waiting: Waiting) -> None:
        """Keep a request until it is placed."""
        self.held[waiting.intake].append(waiting)

    def forget(self) -> None:
        """Drop all that is held; it stays in the intake."""
        for held in self.held.values():
            held.clear()

    def in_order(self, turn: int) -> Iterator[Waiting]:
        """What is held, in the order in which it should be placed at this turn."""
        classes = list(self.held)
        if turn % FAIR_TURN == FAIR_TURN - 1:
            classes = [classes[0], *reversed(classes[1:])]
        for name in classes:
            yield from self.held[name]
