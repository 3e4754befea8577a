"""Checks the part of the intake that the dispatcher has not read, a bounded part once a second.

Requests past their deadline are answered, requests that plain XADDs added beyond the bound are
refused, and requests of clients that have disappeared are cancelled, where they asked for that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from coordinator.dispatch.admission import refuse, refuse_late
from coordinator.dispatch.entries import Entry
from coordinator.recovery.cancels import cancel_listed
from coordinator.recovery.failover import ClockSteps
from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.broker.direct import ask_all
from tokenyard.clock import BrokerTime
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import INTAKE_CLASSES, PRIORITY_CLASSES, IntakeClass, PriorityClass
from tokenyard.protocol.parse import parse_name, parse_request
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.wire import Refused, Request
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Cancelled

log = logging.getLogger("tokenyard.coordinator.sweeper")

EVERY_S = 1.0
#: Entries of each class that one round reads, and requests that one round answers or cancels.
MOST_READ = 1000
MOST_ACTED_ON = 100
#: The same id cannot be submitted again before its refusal has expired, so this is short.
FULL_TTL_S = 60
#: Bytes of a bad value that a log shows.
_SHOWN = 100
#: Why the requests of a client without a lease are cancelled.
_GONE = "its client has disappeared"


class Sweeper:
    """Answers or cancels waiting requests that are not in the backlog."""

    def __init__(
        self,
        scripts: Scripts,
        settings: CoordinatorSettings,
        counts: CoordinatorCounts,
        *,
        clock_steps: ClockSteps,
        broker_time: BrokerTime,
        answer: Callable[[Entry, Refused], None],
    ) -> None:
        self._yard = scripts.yard
        self._scripts = scripts
        self._clock_steps = clock_steps
        self._broker_time = broker_time
        self._counts = counts
        most = settings.max_num_queued_reqs
        #: Most waiting requests of each class and those below it together, as in `submit`.
        self._bounds: Mapping[PriorityClass, int] = {
            "high": most,
            "normal": math.ceil(most * settings.max_normal_share),
            "low": math.ceil(most * settings.max_low_share),
        }
        self._answer = answer
        self._cursors: dict[IntakeClass, str] = dict.fromkeys(INTAKE_CLASSES, "-")
        self._due = 0.0
        self._acted = 0  # in this round

    @property
    def has_more(self) -> bool:
        """Whether the next round should not wait: this one ended before its work was done."""
        return not self._due

    def run_once(self) -> None:
        """One round, when it is due."""
        if clock.monotonic() < self._due:
            return
        self._acted = 0
        lengths = self._lengths()
        for name, length in lengths.items():
            if length:
                self._expire(name)
        self._shed(lengths)
        has_more_clients = self._cancel_abandoned()
        is_behind = has_more_clients or self._acted >= MOST_ACTED_ON
        self._due = 0.0 if is_behind else clock.monotonic() + EVERY_S

    @property
    def _left(self) -> int:
        """How many requests this round may still act on."""
        return max(0, MOST_ACTED_ON - self._acted)

    def _lengths(self) -> dict[IntakeClass, int]:
        ask = [("XLEN", self._yard.keys.intake(name)) for name in INTAKE_CLASSES]
        return dict(zip(INTAKE_CLASSES, ask_all(self._yard.connection, ask), strict=True))

    def _expire(self, name: IntakeClass) -> None:
        after = self._cursors[name]
        cursor, overdue = self._scripts.overdue(
            name,
            after,
            MOST_READ,
            now_ms=self._broker_time.now_ms,
            old_until=self._clock_steps.old_until(name),
        )
        now = overdue[: self._left]
        if len(now) == len(overdue):
            self._cursors[name] = cursor or "-"
        elif now:
            self._cursors[name] = now[-1]
        for entry in self._entries(name, now):
            request = parse_request(entry.fields)
            if isinstance(request, Request):
                self._refuse(entry, refuse_late(request))
            elif isinstance(request, Refused):
                self._refuse(entry, request)

    def _refuse(self, entry: Entry, refused: Refused) -> None:
        self._acted += 1
        self._answer(entry, refused)

    def _entries(self, name: IntakeClass, ids: Iterable[str]) -> list[Entry]:
        stream = self._yard.keys.intake(name)
        found: list[Any] = [self._yard.connection.xrange(stream, one, one) for one in ids]
        return [Entry(name, one[0][0].decode(), one[0][1]) for one in found if one]

    def _shed(self, lengths: Mapping[IntakeClass, int]) -> None:
        """Refuse the newest requests that were added without a check for room.

        Requests that `submit` accepted have a ledger and stay.
        """
        here = sum(lengths[name] for name in PRIORITY_CLASSES) - self._bounds["high"]
        below = 0
        for name in reversed(PRIORITY_CLASSES):
            below += lengths[name]
            excess = min(lengths[name], max(here, below - self._bounds[name]))
            refused = self._refuse_newest(name, excess) if excess > 0 else 0
            here, below = here - refused, below - refused

    def _refuse_newest(self, name: PriorityClass, most: int) -> int:
        """The number of requests of a class that were refused."""
        if not (count := min(most, self._left)):
            return 0
        before = self._acted
        newest: Any = self._yard.connection.xrevrange(self._yard.keys.intake(name), count=count)
        for item, fields in newest:
            request = parse_request(fields)
            if isinstance(request, Request) and not self._is_known(request):
                refused = _full(request, name, self._bounds[name])
                self._refuse(Entry(name, item.decode(), fields), refused)
        return self._acted - before

    def _is_known(self, request: Request) -> bool:
        ledger = self._yard.keys.ledger(request.client, request.id)
        return bool(self._yard.connection.exists(ledger))

    def _cancel_abandoned(self) -> bool:
        """Cancel requests of clients that have disappeared; whether there may be more of those."""
        names = self._scripts.watch_clients(MOST_ACTED_ON, now_ms=self._broker_time.now_ms)
        for raw in names:
            if not self._left:
                return True
            client = parse_name(raw)
            if client is None:
                self._yard.connection.zrem(self._yard.keys.clients, raw)
                self._counts.bad["clients"] += 1
                log.warning("removed %r from the clients: it is not a name", raw[:_SHOWN])
                continue
            self._cancel_all(client)
        # Many names without requests must not keep others waiting.
        return len(names) == MOST_ACTED_ON

    def _cancel_all(self, client: str) -> None:
        """Cancel the requests of a client that has disappeared, as many as this round may."""
        attached = self._yard.keys.attached(client)
        ids: Any = self._yard.connection.srandmember(attached, self._left)
        if not ids:
            self._yard.connection.zrem(self._yard.keys.clients, client)
        for raw in ids or ():
            self._acted += 1
            code = cancel_listed(self._scripts, attached, client, raw, _GONE)
            if code is None:
                self._counts.bad["clients"] += 1
            elif code not in {Cancelled.MOVED, Cancelled.OVER}:
                log.info("cancelled %s/%s: %s", client, raw.decode(), _GONE)


def _full(request: Request, name: PriorityClass, most: int) -> Refused:
    message = f"{most} requests of class {name} or below wait already; try again later"
    brief = msgspec.structs.replace(request, result_ttl_s=min(request.result_ttl_s, FULL_TTL_S))
    return refuse(brief, Code.QUEUE_FULL, message)
