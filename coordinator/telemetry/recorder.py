"""Writes the yard's history: each 10 s what the leader sees, and what ended since the entry before.

Workers and this process count from their own start. So an entry has what was added while this
leader watched, and for how many seconds that was: nothing is counted twice when a worker rejoins
or another coordinator leads, and what nobody watched is in no entry.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from redis.exceptions import NoPermissionError

from coordinator.roster import Roster, RosterMember
from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.protocol.leader_reports import EVERY_MS, MAX_ENTRIES, HistorySample, history_fields
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.scripts import Scripts
from tokenyard.telemetry.metrics import summed, trimmed

log = logging.getLogger("tokenyard.coordinator.recorder")

#: What was watched for less has no entry of its own: its rates would mean little.
LEAST_MS: Final = EVERY_MS // 2
NOTHING: Final = WorkerTotals()


@dataclass(slots=True)
class Watched:
    """What workers and coordinator had counted at the entry before."""

    since_s: float  # monotonic
    totals: Mapping[str, WorkerTotals]  # by worker, with its incarnation
    ends: int = 0  # requests that the coordinator has answered
    dead: int = 0
    wait: Sequence[int] = ()


class HistoryRecorder:
    """Writes the entries of one coordinator, while it leads."""

    def __init__(self, scripts: Scripts, roster: Roster, counts: CoordinatorCounts) -> None:
        self._scripts = scripts
        self._roster = roster
        self._counts = counts
        self._token = ""
        self._due_s = 0.0  # monotonic
        self._watched = Watched(0.0, {})
        self._members: Mapping[str, RosterMember] = {}
        self._totals: dict[str, WorkerTotals] = {}  # also of workers that have left since
        self._is_allowed = True

    def run_once(self, token: str) -> None:
        """Look at the roster, and write an entry when that is due."""
        if token != self._token:
            self._begin(token)
        elif self._roster.members is not self._members:
            self._look()
        if clock.monotonic() >= self._due_s and self._is_allowed:
            self._write()

    def _look(self) -> None:
        self._members = self._roster.members
        self._totals.update((worker, one.info.tally) for worker, one in self._members.items())

    def _begin(self, token: str) -> None:
        """What was counted before belongs to another leader."""
        self._token = token
        self._is_allowed = True
        self._totals = {}
        self._look()
        self._watch()

    def _watch(self) -> None:
        """Begin the time of the next entry, which ends at a whole number of 10 s."""
        now_ms, now_s = self._roster.broker_time.now_ms, clock.monotonic()
        self._totals = {worker: one.info.tally for worker, one in self._members.items()}
        self._watched = Watched(
            now_s, self._totals.copy(), self._ends(), self._deaths(), self._waits()
        )
        self._due_s = now_s + (LEAST_MS + EVERY_MS - (now_ms + LEAST_MS) % EVERY_MS) / 1000

    def _write(self) -> None:
        sample = self._sample()
        # First, so that what is lost with the answer is missing and not counted twice.
        self._watch()
        try:
            self._scripts.record(self._token, history_fields(sample), MAX_ENTRIES)
        except NoPermissionError as error:
            self._is_allowed = False
            log.warning("this term has no history: the user of Redis may not write it: %s", error)

    def _sample(self) -> HistorySample:
        before, members = self._watched, self._members.values()
        now_ms = self._roster.broker_time.now_ms
        added = [_added(before.totals.get(one, NOTHING), now) for one, now in self._totals.items()]
        ends = self._ends() - before.ends
        living = [one for one in members if one.lease_ms > now_ms]
        return HistorySample(
            at_ms=int(now_ms),
            waiting={},
            epoch=int(self._token.partition(":")[0]),
            running=sum(one.load for one in members),
            workers=len(living),
            ready=sum(one.serves for one in living),
            seconds=clock.monotonic() - before.since_s,
            finished=ends + sum(one.finished for one in added),
            failed=ends + sum(one.failed for one in added),
            tokens=sum(one.tokens for one in added),
            dead=self._deaths() - before.dead,
            ttft=trimmed(summed(one.ttft for one in added if one.ttft)),
            wait=trimmed(_less(self._waits(), before.wait)),
        )

    def _ends(self) -> int:
        return sum(self._counts.results.values())

    def _deaths(self) -> int:
        return sum(self._counts.dead.values())

    def _waits(self) -> Sequence[int]:
        return summed(one.counts for one in self._counts.queue_wait.values())


def _added(before: WorkerTotals, now: WorkerTotals) -> WorkerTotals:
    """What a worker has counted since; all of it where it began again."""
    if now is before or now == before:
        return NOTHING
    if now.finished < before.finished or now.tokens < before.tokens:
        before = NOTHING
    return WorkerTotals(
        finished=now.finished - before.finished,
        failed=max(0, now.failed - before.failed),
        tokens=now.tokens - before.tokens,
        ttft=_less(now.ttft, before.ttft),
    )


def _less(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [max(0, one - was) for one, was in zip_longest(now, before, fillvalue=0)]
