"""Reading the intakes of tenants: of those who are next in line, however many there are.

The line is a sorted set of the tenants with waiting requests. A turn looks at its first page, and
where those want nothing that has room, at another page behind it, so that models that only those
farther back want are not idle. A yard without tenants costs one more command each time that the
roster is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from coordinator.dispatch.backlog import Backlog
from coordinator.dispatch.entries import BEGIN, Entry, pairs
from coordinator.dispatch.plan import PlannedDispatch
from coordinator.dispatch.tenant_shares import USUAL_AT_FIRST
from coordinator.routing.queued_request import QueuedRequest
from tokenyard import clock
from tokenyard.broker.direct import ask_all
from tokenyard.protocol.keys import (
    PRIORITY_CLASSES,
    Keys,
    Yard,
    intake_name,
    is_tenant,
    split_intake,
)
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import decode_tenants
from tokenyard.scripts.answers import Charge

#: Tenants of one page of the line. With 256 the broker took a quarter longer for each request.
PAGE: Final = 64
#: Tenants at their limit for whom the first page grows, so that it has as many others as ever.
MOST_HELD: Final = 1024
#: Tenants whose settings and counts are read again, at most: of very many, each less often.
DESCRIBED_PER_S: Final = 1000
#: Fields of a tenant's counts that the leader needs.
_COUNTS: Final = ("usual", "running")


class TenantIntakes:
    """Adds what tenants have waiting to the backlog's knowledge, the first in line first."""

    def __init__(self, yard: Yard, backlog: Backlog, settings: CoordinatorSettings) -> None:
        self._yard = yard
        self._backlog = backlog
        self._shares = backlog.tenants
        self._held = backlog.tenants.held
        self._max_held = settings.max_held
        self._streams = TenantStreams(yard.keys, backlog, settings)
        self._described_at = 0.0  # the first tenant of `_described` (monotonic)
        # Intakes to compare with the backlog, now and later.
        self._to_check: list[str] = []
        self._unchecked: list[str] = []
        self._is_changed = False  # settings of tenants have
        self.begin()

    def begin(self) -> None:
        """Forget everything; the backlog is empty, too."""
        self._shares.clear()
        self._streams.clear()
        self._described: set[str] = set()  # tenants whose settings and counts are fresh
        self._depth = 1  # see `look_behind`
        self._cursor = PAGE  # where the page behind the first begins
        #: Whether somebody is in line; True until the line was read.
        self.is_in_use = True
        self._looks_behind = True
        self._has_lapped = False
        #: Whether the common intakes stand in line, as the tenant "".
        self.has_common = False
        #: Tenants in line of whom nothing is there.
        self.missing: list[str] = []

    def wake(self, intake: str) -> None:
        """A request came into an intake; "": settings of tenants have changed."""
        self.is_in_use = True
        self._has_lapped = False
        self._streams.wake(intake)
        if not intake:
            self._described.clear()
            self._is_changed = True

    def take_changed(self) -> bool:
        """Whether settings of tenants have changed since the last call."""
        is_changed, self._is_changed = self._is_changed, False
        return is_changed

    def miss(self) -> None:
        """Events may have been lost: any intake may have requests that were not read."""
        self.is_in_use = True
        self._has_lapped = False
        self._streams.doubt()

    def refresh(self, in_line: int) -> None:
        """Now and then: what was known is read again, in case that an event was lost."""
        self.is_in_use = in_line > 0
        self._looks_behind, self._has_lapped = True, False
        self._depth = 1
        self._held.wake()
        now = clock.monotonic()
        if len(self._described) <= DESCRIBED_PER_S * (now - self._described_at):
            self._described.clear()
            self._described_at = now
        self._held.release(self._is_known)
        if not self._unchecked:  # once a lap, since this walks over all tenants
            self._unchecked = self._streams.begin_lap()
        self._to_check, self._unchecked = self._unchecked[:PAGE], self._unchecked[PAGE:]
        self._streams.doubt(self._shares.first)

    def read(self) -> list[Entry]:
        """Requests that were not read before, of those who are next in line."""
        if not self.is_in_use:
            return []
        others, in_line = self.read_line()
        if not self._shares.first:
            self.is_in_use = False
            return []
        first = self._shares.first
        names = [*filter(None, first), *filter(None, others)]
        entries, empty = self._read_entries(
            self._streams.wanted(names, first, in_line, self._depth), names
        )
        self._note_unread(empty)
        return entries

    def charge(self, plan: Sequence[PlannedDispatch]) -> Sequence[Charge | None]:
        """What each request is charged; at no cost without tenants."""
        names = {item.queued.tenant for item in plan}
        if not self._shares.first and names == {""}:
            return [None] * len(plan)
        # A tenant may not be in line: a retry is charged to one, too.
        strange = [name for name in names if name and name not in self._described]
        self._ask((), strange, strange)
        return [self._shares.charge(item.queued) for item in plan]

    def _is_known(self, tenant: str) -> bool:
        """Whether a tenant is among the first, or has requests in the backlog."""
        return tenant in self._shares.first or any(map(self._backlog.count, intakes_of(tenant)))

    def hold(self, tenant: str) -> None:
        """A script has refused to run more of a tenant; its settings may be others by now."""
        self._held.refuse(tenant)
        self._described.discard(tenant)

    def is_common_wrong(self) -> bool:
        """Whether the common intakes must join the line or leave it."""
        has_requests = any(self._backlog.count(name) for name in PRIORITY_CLASSES)
        return self.has_common != (has_requests and bool(self._shares.first.keys() - {""}))

    def look_behind(self) -> bool:
        """Look on, since there is room that nobody known wants; whether there is more to see.

        First at the pages behind the first, once until somebody comes; then deeper into what the
        first have waiting; and at held tenants.
        """
        if len(self._backlog) >= self._max_held:
            return self._held.has_more
        self._looks_behind = self._shares.has_more and not self._has_lapped
        if not self._looks_behind and self._shares.unread:
            self._depth = min(2 * self._depth, self._max_held)
            return True
        return self._looks_behind or self._held.has_more

    def read_line(self) -> tuple[list[str], int]:
        """Read who is first; who is in the page behind them, and how many there are."""
        line = self._yard.keys.line
        size = PAGE + min(MOST_HELD, sum(name in self._shares.first for name in self._held))
        cursor = max(self._cursor, size)
        commands: list[Command] = [
            ("ZRANGE", line, 0, size - 1, "WITHSCORES"),
            ("ZCARD", line),
            ("ZSCORE", line, ""),
        ]
        looks_behind, self._looks_behind = self._looks_behind and self._shares.has_more, False
        if looks_behind:
            commands.append(("ZRANGE", line, cursor, cursor + PAGE - 1, "WITHSCORES"))
        first, in_line, common, *behind = ask_all(self._yard.connection, commands)
        self.has_common = common is not None
        if self._shares.see(_services(first), has_more=in_line > len(first) // 2):
            self._described.intersection_update(self._shares.first)
        others = _services(behind[0]) if behind else {}
        if looks_behind:
            self._has_lapped = cursor + PAGE >= in_line
            self._cursor = PAGE if self._has_lapped else cursor + PAGE
        for tenant, service in others.items():
            self._shares.note(tenant, service)
        return [name for name in others if name not in self._shares.first], in_line

    def _read_entries(
        self, parts: Sequence[Slice], names: Sequence[str]
    ) -> tuple[list[Entry], set[str]]:
        """The entries, and the intakes that have none; and what must be known of these tenants."""
        strange = [name for name in names if name not in self._described]
        limited = [
            name for name in names if name not in self._held and self._shares.state(name).is_limited
        ]
        counted = list({*strange, *limited, *self._held.next_page(PAGE)})
        reads = self._streams.commands(parts)
        return self._streams.take(parts, self._ask(reads, strange, counted))

    def _ask(
        self, reads: Sequence[Command], strange: Sequence[str], counted: Sequence[str]
    ) -> list[Any]:
        """The answers to some reads; with them, read settings of tenants, and counts of others."""
        commands = [*reads, *(("HMGET", self._yard.keys.tenant(one), *_COUNTS) for one in counted)]
        if strange:
            commands.append(("HMGET", self._yard.keys.tenants, *strange))
        answers = ask_all(self._yard.connection, commands)
        if strange:
            self._set(strange, answers.pop())
        self._count(counted, answers[len(reads) :])
        return answers[: len(reads)]

    def _set(self, names: Sequence[str], packed: Sequence[bytes | None]) -> None:
        """Keep the settings of these tenants."""
        given = {name.encode(): one for name, one in zip(names, packed, strict=True) if one}
        known = decode_tenants(given)
        for name in names:
            self._shares.configure(name, known.get(name))
        self._described.update(names)

    def _count(self, names: Sequence[str], counts: Iterable[Sequence[bytes | None]]) -> None:
        for name, (usual, running) in zip(names, counts, strict=True):
            self._shares.count(
                name, usual=_number(usual, USUAL_AT_FIRST), running=max(0, whole(running))
            )

    def _note_unread(self, empty: set[str]) -> None:
        first = [name for name in self._shares.first if name]
        self.missing = [name for name in first if empty.issuperset(intakes_of(name))]
        able = (name for name in first if name not in self._held)
        self._shares.unread = {name for name in able if not self._streams.is_exhausted(name)}

    def gone(self) -> list[QueuedRequest]:
        """Requests of the backlog that may not wait any more, of a page of intakes a second.

        Where fewer wait than are known, for example since their client has cancelled some, all of
        them are read again.
        """
        page, self._to_check = self._to_check, []
        if not page:
            return []
        lengths = ask_all(
            self._yard.connection, [("XLEN", self._yard.keys.intake(one)) for one in page]
        )
        return [
            queued
            for intake, length in zip(page, lengths, strict=True)
            if length < self._backlog.count(intake)
            for queued in self._streams.forget(intake)
        ]


def _services(items: Sequence[bytes]) -> Mapping[str, float]:
    """By tenant; what cannot be a tenant's name is left out, "" is none."""
    names = [name.decode(errors="replace") for name in items[::2]]
    pairs = zip(names, map(float, items[1::2]), strict=True)
    return {name: service for name, service in pairs if not name or is_tenant(name)}


def _number(value: bytes | None, default: float) -> float:
    try:
        number = float(value) if value is not None else default
    except ValueError:
        return default
    return number if 0 <= number < math.inf else default


# What was read of the streams of tenants, and what to read next.
#
# These intakes have no consumer group: an entry is there until it was dispatched or answered, and
# what was read is known by its id. So nothing is lost if what was read is forgotten.

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

    def __init__(self, keys: Keys, backlog: Backlog, settings: CoordinatorSettings) -> None:
        self._keys = keys
        self._backlog = backlog
        self._max_batch = settings.max_batch
        self._max_held = settings.max_held
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
        share = max(LOOK_AHEAD, self._max_batch // max(1, len(open_)))
        spare = self._max_batch
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
