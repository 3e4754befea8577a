"""Reading the intakes of tenants: of those who are next in line, however many there are.

The line is a sorted set of the tenants with waiting requests. A turn looks at its first page, and
where those want nothing that has room, at another page behind it, so that models that only those
farther back want are not idle. A yard without tenants costs one more command each time that the
roster is read.

These intakes have no consumer group: an entry is there until it was dispatched or answered, and
what was read is known by its id. So nothing is lost if what was read is forgotten.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import redis
from msgspec import Struct

from coordinator.dispatch.backlog import Backlog
from coordinator.dispatch.entries import Entry
from coordinator.dispatch.tenant_shares import USUAL_AT_FIRST
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.keys import PRIORITY_CLASSES, Keys, intake_name, is_tenant, split_intake
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import decode_tenants

#: Tenants of one page of the line.
PAGE: Final = 64
#: Requests of each intake that are read at least: with a page of them about a batch.
LOOK_AHEAD: Final = 4
#: Fields of a tenant's counts that the leader needs.
_COUNTS: Final = ("usual", "running")


class _Wanted(Struct, frozen=True):
    """A part of an intake to read."""

    intake: str
    after: str
    count: int


class TenantIntakes:
    """Adds what tenants have waiting to the backlog's knowledge, the first in line first."""

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        backlog: Backlog,
        *,
        max_batch: int,
        max_held: int,
    ) -> None:
        """``max_batch`` and ``max_held`` as for the `Intake`."""
        self._connection = connection
        self._keys = keys
        self._backlog = backlog
        self._shares = backlog.tenants
        self._max_batch = max_batch
        self._max_held = max_held
        self._after: dict[str, str] = {}  # last entry read, by intake
        self._exhausted: set[str] = set()  # intakes of which everything was read
        self._described: set[str] = set()  # tenants whose settings and counts are fresh
        self._cursor = PAGE  # where the page behind the first begins
        # Intakes to compare with the backlog, now and later.
        self._to_check: list[str] = []
        self._unchecked: list[str] = []
        self._is_changed = False  # settings of tenants have
        self.begin()

    def begin(self) -> None:
        """Forget everything; the backlog is empty, too."""
        self._shares.clear()
        self._after.clear()
        self._exhausted.clear()
        self._described.clear()
        self._cursor = PAGE
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
        self._exhausted.discard(intake)
        if not intake:
            self._described.clear()
            self._is_changed = True

    def take_changed(self) -> bool:
        """Whether settings of tenants have changed since the last call."""
        is_changed, self._is_changed = self._is_changed, False
        return is_changed

    def refresh(self, in_line: int) -> None:
        """Now and then: what was known is read again, in case that an event was lost."""
        self.is_in_use = in_line > 0
        self._looks_behind, self._has_lapped = True, False
        self._described.clear()
        if not self._unchecked:
            self._begin_lap()
        self._to_check, self._unchecked = self._unchecked[:PAGE], self._unchecked[PAGE:]
        self._exhausted.difference_update(*map(_intakes, self._shares.first))

    def _begin_lap(self) -> None:
        """The intakes of the backlog are to be checked, page by page; of others nothing is known.

        Once a lap, since this walks over all tenants.
        """
        held = self._backlog.intakes
        self._unchecked = [intake for intake in held if split_intake(intake)[1]]
        names = {split_intake(intake)[1] for intake in self._unchecked}
        self._exhausted = {one for one in self._exhausted if split_intake(one)[1] in names}
        self._after = {intake: at for intake, at in self._after.items() if intake in held}

    def read(self) -> list[Entry]:
        """Requests that were not read before, of those who are next in line."""
        if not self.is_in_use:
            return []
        others, in_line = self.read_line()
        if not self._shares.first:
            self.is_in_use = False
            return []
        wanted = list(
            self._wants([*filter(None, self._shares.first), *filter(None, others)], in_line)
        )
        entries, empty = self._read_entries(wanted)
        self._note_unread(empty)
        return entries

    def describe(self, names: Iterable[str]) -> None:
        """Read the settings of tenants that may not be in line: a retry is charged to one, too."""
        strange = [name for name in names if name and name not in self._described]
        if not strange:
            return
        pipeline = self._connection.pipeline(transaction=False)
        for name in strange:
            pipeline.hmget(self._keys.tenant(name), _COUNTS)
        pipeline.hmget(self._keys.tenants, strange)
        *counts, packed = pipeline.execute()
        self._set(strange, packed)
        self._count(strange, counts)

    def is_common_wrong(self) -> bool:
        """Whether the common intakes must join the line or leave it."""
        has_requests = any(self._backlog.count(name) for name in PRIORITY_CLASSES)
        return self.has_common != (has_requests and bool(self._shares.first.keys() - {""}))

    def look_behind(self) -> bool:
        """Look at the next page behind the first, unless the last one was seen; whether it will."""
        has_room = len(self._backlog) < self._max_held
        self._looks_behind = self._shares.has_more and has_room and not self._has_lapped
        return self._looks_behind

    def read_line(self) -> tuple[list[str], int]:
        """Read who is first; who is in the page behind them, and how many there are."""
        line, cursor = self._keys.line, self._cursor
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.zrange(line, 0, PAGE - 1, withscores=True)
        pipeline.zcard(line)
        pipeline.zscore(line, "")
        looks_behind, self._looks_behind = self._looks_behind and self._shares.has_more, False
        if looks_behind:
            pipeline.zrange(line, cursor, cursor + PAGE - 1, withscores=True)
        first, in_line, common, *behind = pipeline.execute()
        self.has_common = common is not None
        self._shares.see(_services(first), has_more=in_line > len(first))
        others = _services(behind[0]) if behind else {}
        if looks_behind:
            self._has_lapped = cursor + PAGE >= in_line
            self._cursor = PAGE if self._has_lapped else cursor + PAGE
        for tenant, service in others.items():
            self._shares.note(tenant, service)
        return [name for name in others if name not in self._shares.first], in_line

    def _wants(self, names: Sequence[str], in_line: int) -> Iterator[_Wanted]:
        """What to read: where there is no room in the backlog, only what nothing is known of."""
        has_room = len(self._backlog) < self._max_held
        most = max(LOOK_AHEAD, self._max_held // in_line) if has_room else LOOK_AHEAD
        fresh = [name for name in names if not self._holds(name)]
        for name in fresh:
            self._exhausted.difference_update(_intakes(name))
        urgent = [name for name in fresh if name in self._shares.first]
        open_ = [
            intake
            for name in (names if has_room else urgent)
            for intake in _intakes(name)
            if intake not in self._exhausted and self._backlog.count(intake) < most
        ]
        share = max(LOOK_AHEAD, self._max_batch // max(1, len(open_)))
        for intake in open_:
            held = self._backlog.count(intake)
            after = self._after.get(intake, "") if held else ""
            yield _Wanted(intake, f"({after}" if after else "-", min(share, most - held))

    def _holds(self, name: str) -> bool:
        return any(self._backlog.count(intake) for intake in _intakes(name))

    def _read_entries(self, wanted: Sequence[_Wanted]) -> tuple[list[Entry], set[str]]:
        """The entries, and the intakes that have none."""
        strange = [name for name in self._shares.first if name not in self._described]
        limited = [name for name in self._shares.first if self._shares.state(name).is_limited]
        counted = [name for name in {*strange, *limited} if name]
        if not wanted and not counted:
            return [], set()
        pipeline = self._connection.pipeline(transaction=False)
        for one in wanted:
            pipeline.xrange(self._keys.intake(one.intake), one.after, "+", one.count)
        for name in counted:
            pipeline.hmget(self._keys.tenant(name), _COUNTS)
        if strange:
            pipeline.hmget(self._keys.tenants, strange)
        answers = pipeline.execute()
        if strange:
            self._set(strange, answers.pop())
        self._count(counted, answers[len(wanted) :])
        return self._take(wanted, answers)

    def _take(
        self, wanted: Iterable[_Wanted], answers: Iterable[Any]
    ) -> tuple[list[Entry], set[str]]:
        entries: list[Entry] = []
        empty: set[str] = set()
        for one, items in zip(wanted, answers, strict=False):
            found = [Entry(one.intake, item.decode(), fields) for item, fields in items]
            if found:
                self._after[one.intake] = found[-1].id
            elif one.after == "-":
                empty.add(one.intake)
            if len(found) < one.count:
                self._exhausted.add(one.intake)
            entries += [each for each in found if not self._backlog.get(one.intake, each.id)]
        return entries, empty

    def _set(self, names: Sequence[str], packed: Sequence[bytes | None]) -> None:
        """Keep the settings of these tenants."""
        given = {name.encode(): one for name, one in zip(names, packed, strict=True) if one}
        known = decode_tenants(given)
        for name in names:
            self._shares.configure(name, known.get(name))
        self._described.update(names)

    def _count(self, names: Sequence[str], counts: Iterable[Sequence[bytes | None]]) -> None:
        for name, (usual, running) in zip(names, counts, strict=True):
            state = self._shares.state(name)
            state.usual = _number(usual, USUAL_AT_FIRST)
            state.running = max(0, whole(running))

    def _note_unread(self, empty: set[str]) -> None:
        first = [name for name in self._shares.first if name]
        self.missing = [name for name in first if empty.issuperset(_intakes(name))]
        self._shares.unread = {
            name for name in first if not self._exhausted.issuperset(_intakes(name))
        }

    def gone(self) -> list[QueuedRequest]:
        """Requests of the backlog that may not wait any more, of a page of intakes a second.

        Where fewer wait than are known, for example since their client has cancelled some, all of
        them are read again.
        """
        page, self._to_check = self._to_check, []
        if not page:
            return []
        pipeline = self._connection.pipeline(transaction=False)
        for intake in page:
            pipeline.xlen(self._keys.intake(intake))
        return [
            queued
            for intake, length in zip(page, pipeline.execute(), strict=True)
            if length < self._backlog.count(intake)
            for queued in self._forget(intake)
        ]

    def _forget(self, intake: str) -> list[QueuedRequest]:
        self._exhausted.discard(intake)
        self._after.pop(intake, None)
        found = (self._backlog.get(intake, entry) for entry in self._backlog.ids(intake))
        return [queued for queued in found if queued]


def _services(items: Iterable[tuple[bytes, float]]) -> Mapping[str, float]:
    """By tenant; what cannot be a tenant's name is left out, "" is none."""
    found = {name.decode(errors="replace"): service for name, service in items}
    return {name: service for name, service in found.items() if not name or is_tenant(name)}


def _number(value: bytes | None, default: float) -> float:
    try:
        number = float(value) if value is not None else default
    except ValueError:
        return default
    return number if 0 <= number < math.inf else default


@functools.lru_cache(2 * PAGE)  # asked for several times in a turn
def _intakes(tenant: str) -> Sequence[str]:
    return [intake_name(name, tenant) for name in PRIORITY_CLASSES]
