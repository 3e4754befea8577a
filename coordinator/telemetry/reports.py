"""The leader's reports (`tokenyard.protocol.leader_reports`): the demand by model, and the history.

The history has each 10 s what the leader sees, and what ended since the entry before. Workers and
this process count from their own start. So an entry has what was added while this leader watched,
and for how many seconds that was: nothing is counted twice when a worker rejoins or another
coordinator leads, and what nobody watched is in no entry.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import msgspec
from redis.exceptions import NoPermissionError

from coordinator.roster import Roster, RosterMember
from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.leader_reports import (
    EVERY_MS,
    FIELD,
    MAX_ENTRIES,
    HistorySample,
    ModelDemand,
    YardDemand,
    history_fields,
)
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.scripts import Scripts
from tokenyard.telemetry.metrics import summed, trimmed
from tokenyard.telemetry.queues import depths_of, queue_depths

log = logging.getLogger("tokenyard.coordinator.recorder")

#: Requests that a worker takes at once, for a model of which no worker has said its lane's limit.
USUAL_LANE: Final = 64
#: What was watched for less has no entry of its own: its rates would mean little.
LEAST_MS: Final = EVERY_MS // 2
NOTHING: Final = WorkerTotals()


def publish_demand(
    scripts: Scripts, token: str, waiting: Mapping[str, int], roster: Roster
) -> None:
    """Say how many requests wait, ``waiting`` of them for each model, as far as is known."""
    known = Counter(waiting)
    known[""] += max(0, _count_waiting(scripts.yard) - known.total())
    demand = YardDemand(round(roster.broker_time.now_ms), demand_of(+known, roster))
    scripts.take_over(token, {FIELD: msgspec.json.encode(demand)})


def _count_waiting(yard: Yard) -> int:
    """All requests that wait: in the common intakes, and in those of tenants."""
    pipeline = yard.connection.pipeline(transaction=False)
    queue_depths(pipeline, yard.keys)
    return sum(depths_of(pipeline.execute()).values())


def demand_of(waiting: Mapping[str, int], roster: Roster) -> dict[str, ModelDemand]:
    """What waits, runs and is pinned, by model."""
    running: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    limits: Counter[str] = Counter()
    for member in roster.members.values():
        model = member.info.model
        running[model] += member.load
        busy[model] += bool(member.load and member.has_lease)
        limits[model] = max(limits[model], member.info.lane_limit)
    pins: Counter[str] = Counter()
    for host in (*roster.gone, *roster.hosts.values()):
        for info in host.models:
            pins[info.name] = max(pins[info.name], info.pin)
    demand = {}
    for model in sorted({*waiting, *(+running), *(+pins)}):
        waits, runs = waiting.get(model, 0), running[model]
        for_requests = -(-(waits + runs) // (limits[model] or USUAL_LANE))
        workers = max(for_requests, busy[model], pins[model])
        demand[model] = ModelDemand(waits, runs, workers)
    return demand


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
        if token != self._token:  # what was counted before belongs to another leader
            self._token, self._is_allowed = token, True
            self._watch()
        elif self._roster.members is not self._members:
            self._members = self._roster.members
            self._totals.update((worker, one.info.tally) for worker, one in self._members.items())
        if clock.monotonic() >= self._due_s and self._is_allowed:
            self._write()

    def _watch(self) -> None:
        """Begin the time of the next entry, which ends at a whole number of 10 s."""
        now_ms, now_s = self._roster.broker_time.now_ms, clock.monotonic()
        self._members = self._roster.members
        self._totals = {worker: one.info.tally for worker, one in self._members.items()}
        self._watched = Watched(now_s, self._totals.copy(), *self._counted())
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
        ends, dead, wait = self._counted()
        ends -= before.ends
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
            dead=dead - before.dead,
            ttft=trimmed(summed(one.ttft for one in added if one.ttft)),
            wait=trimmed(_less(wait, before.wait)),
        )

    def _counted(self) -> tuple[int, int, Sequence[int]]:
        """What the coordinator has counted: requests that it answered, dead letters, waits."""
        waits = summed(one.counts for one in self._counts.queue_wait.values())
        return self._counts.results.total(), self._counts.dead.total(), waits


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
