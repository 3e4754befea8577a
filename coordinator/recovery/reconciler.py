"""Ends requests whose entry was deleted by hand, so that ledgers and streams agree.

Each script moves a request whole, so a missing entry was deleted by something else (`XDEL`,
`XTRIM`, `XADD` with MAXLEN), and nothing else would ever answer its request. The ledgers are read
with SCAN, a bounded part once a second, and without a pause once something was found or missed.
Tenants with something waiting whom somebody has removed from the line are put there again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import redis
from msgspec import Struct, field

from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.clock import BrokerTime
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass, split_intake
from tokenyard.protocol.leader_reports import LAST, LAST_FOUND, Pass
from tokenyard.protocol.texts import counted
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import LostRequest

log = logging.getLogger("tokenyard.coordinator.reconciler")

EVERY_S: Final = 1.0
#: Keys of the server that one round reads, about (a request that waits or runs has five), and
#: requests that one round ends.
MOST_READ: Final = 1000
MOST_ENDED: Final = 100
#: After a hurried pass there is no other for so many times its duration.
REST: Final = 9
#: Requests with a worker that may still end them, at most.
MOST_WATCHED: Final = 10_000
#: A pass that has found nothing is reported so often.
REPORT_EVERY_S: Final = 60.0
#: Errors of Valkey and Redis where a script lacks a permission.
_NOT_PERMITTED: Final = ("ACL failure in script", "The user executing the script can't")


class _PassTotals(Struct):
    """The results of one pass so far."""

    began: float  # monotonic
    ledgers: int = 0
    ended: int = 0
    tokens: int = 0
    missed: set[LostRequest] = field(default_factory=set)  # their workers may still end them
    counts: list[int] = field(default_factory=list)  # of queued tokens, at each round

    @property
    def excess(self) -> int:
        """By how much the server's count of queued tokens is too high.

        Exact where one round was enough, since it is atomic. Otherwise ledgers and counts are read
        at different moments of the pass.
        """
        return round(sum(self.counts) / len(self.counts)) - self.tokens


class LedgerReconciler:
    """Scans the ledgers continuously, and ends lost requests."""

    def __init__(
        self,
        scripts: Scripts,
        broker_time: BrokerTime,
        counts: CoordinatorCounts,
        *,
        patience_s: float,
        on_returned: Callable[[], None] = lambda: None,
    ) -> None:
        """A worker with a lease has ``patience_s`` to end a request: it may have read the entry.

        ``on_returned`` is called for each tenant that is in line again.
        """
        self._scripts = scripts
        self._patience_s = patience_s
        self._counts = counts
        self._on_returned = on_returned
        self._broker_time = broker_time
        self._missed: dict[LostRequest, float] = {}  # since when (monotonic)
        self._reported_at = -math.inf
        self._rests_until = 0.0
        self.begin()

    def begin(self) -> None:
        """Start a hurried pass: a term of leadership begins."""
        self._cursor, self._due, self._hurries, self._is_refused = 0, 0.0, True, False
        self._totals = _PassTotals(clock.monotonic())

    @property
    def has_more(self) -> bool:
        """Whether the next round should not wait."""
        return self._hurries and not self._is_refused

    def hurry(self) -> None:
        """An entry was missed; it may have been deleted, or its request cancelled."""
        if not self._hurries and clock.monotonic() >= self._rests_until:
            self.begin()

    def run_once(self, token: str) -> None:
        """One round, when it is due."""
        if self._is_refused or (not self._hurries and clock.monotonic() < self._due):
            return
        self._due = clock.monotonic() + EVERY_S
        try:
            look = self._scripts.astray(self._cursor, MOST_READ)
        except redis.exceptions.ResponseError as error:
            if not any(words in str(error) for words in _NOT_PERMITTED):
                raise
            self._is_refused = True
            log.warning("requests whose entry is deleted by hand will not be noticed: %s", error)
            return
        for tenant in look.out_of_line:
            self._put_in_line(token, tenant)
        lost = [one for one in look.found if self._is_lost(one)]
        self._end(token, lost[:MOST_ENDED])
        if len(lost) > MOST_ENDED:  # the same part again, which has fewer now
            self._hurries = True
            return
        self._totals.ledgers += look.ledgers
        self._totals.tokens += look.tokens
        self._totals.counts.append(look.queued_tokens)
        self._cursor = look.cursor
        if not look.cursor:
            self._conclude(token)

    def _put_in_line(self, token: str, tenant: str) -> None:
        """Somebody has removed a tenant from the line by hand, or its counts are wrong."""
        waiting = self._scripts.recount(token, tenant)
        if waiting:
            self._on_returned()
            log.warning("tenant %s was not in line, with %d waiting", tenant, waiting)

    def _is_lost(self, one: LostRequest) -> bool:
        """Whether no worker can answer a request any more."""
        if not one.may_run:
            return True
        now = clock.monotonic()
        if one not in self._missed and len(self._missed) >= MOST_WATCHED:
            return False
        self._totals.missed.add(one)
        return now - self._missed.setdefault(one, now) >= self._patience_s

    def _end(self, token: str, lost: Sequence[LostRequest]) -> None:
        if not lost:
            return
        ended = self._scripts.reconcile(token, lost)
        for one, has_ended in zip(lost, ended, strict=True):
            self._missed.pop(one, None)
            if has_ended:
                self._note(one)
        self._hurries = True

    def _note(self, one: LostRequest) -> None:
        self._totals.ended += 1
        self._counts.answered("", _class_of(one), Code.ENTRY_LOST, is_dead=False)
        place = f"entry {one.entry or '?'} is not in {one.where or '?'}"
        log.info("ended %s/%r as ENTRY_LOST: %s", one.client, one.request_id, place)

    def _conclude(self, token: str) -> None:
        """A pass is over: correct the count of queued tokens, and report what was found."""
        totals, now = self._totals, clock.monotonic()
        took_s = now - totals.began
        excess = totals.excess if totals.ended or len(totals.counts) == 1 else 0
        report = {}
        if totals.ended or now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            packed = msgspec.json.encode(
                Pass(round(self._broker_time.now_ms), took_s, totals.ledgers, totals.ended)
            )
            report = {LAST: packed, **({LAST_FOUND: packed} if totals.ended else {})}
        if self._hurries:
            self._rests_until = now + REST * took_s
        if totals.ended:
            ended, ledgers = counted(totals.ended, "request"), counted(totals.ledgers, "ledger")
            log.warning("ended %s whose entry was deleted, of %s", ended, ledgers)
        self._hurries, self._totals = False, _PassTotals(now)
        self._missed = {one: self._missed[one] for one in totals.missed if one in self._missed}
        if excess or report:
            self._scripts.reconcile(token, excess_tokens=excess, info=report)


def _class_of(one: LostRequest) -> IntakeClass:
    """The intake that it was deleted from; for a lane, whose entries have none, `normal`."""
    name = split_intake(one.where)[0]
    return next((each for each in INTAKE_CLASSES if each == name), "normal")
