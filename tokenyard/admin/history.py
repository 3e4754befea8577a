"""Snapshots of a yard over time, and the rates between two of them.

Only `read_snapshot` does I/O.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tokenyard.admin.dead_letters import DeadLetter, dead_letters
from tokenyard.admin.line import NOBODY, TenantLine, read_line, shares_between
from tokenyard.admin.snapshot import YardView, read_yard
from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.protocol.yard import Yard
from tokenyard.telemetry.intake_ages import read_oldest_ms

#: Dead letters in a snapshot.
LETTERS: Final = 3
#: Time that rates are taken over; workers report about once a second.
SMOOTH_MS: Final = 5000.0
#: Time that shares of tenants are taken over: requests are charged in lumps.
SHARES_MS: Final = 60_000.0
_LINES: Final = 12  # of them that are kept
#: Snapshots in a history.
MAX_SNAPSHOTS: Final = 600


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A yard at one moment."""

    view: YardView
    at_ms: int  # the server's clock
    oldest_ms: dict[IntakeClass, int]  # age of the oldest request of each class
    letters: Sequence[DeadLetter] = ()  # the newest
    line: TenantLine = NOBODY

    @property
    def waiting(self) -> int:
        """Requests in all intakes."""
        return sum(self.view.waiting.values())


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests and tokens per second."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class YardRates:
    """The throughput of a yard, its workers and its models between two snapshots."""

    seconds: float  # between the snapshots
    yard: Throughput
    workers: dict[str, Throughput]
    models: dict[str, Throughput]
    ttft_ms: float | None  # median of the workers' medians of the last minute


def read_snapshot(yard: Yard) -> Snapshot:
    """Read a snapshot; errors of redis-py pass, for `translated`."""
    view = read_yard(yard)
    return Snapshot(
        view=view,
        at_ms=view.at_ms,
        oldest_ms=read_oldest_ms(yard, view.at_ms),
        letters=dead_letters(yard, LETTERS) if view.dead else (),
        line=read_line(yard),
    )


def rates_between(before: Snapshot, now: Snapshot) -> YardRates:
    """The rates between two snapshots; all work of a new worker counts."""
    seconds = max(0.001, (now.at_ms - before.at_ms) / 1000)
    earlier, later = _tallies(before), _tallies(now)
    workers = {
        worker: throughput(earlier.get(worker, WorkerTotals()), tally, seconds)
        for worker, tally in later.items()
    }
    held = {one.worker: one.info.model for one in now.view.workers if one.info}
    models = {
        model: _sum(rate for worker, rate in workers.items() if held[worker] == model)
        for model in sorted(set(held.values()) - {""})
    }
    return YardRates(seconds, _sum(workers.values()), workers, models, _median(later))


def _tallies(snapshot: Snapshot) -> Mapping[str, WorkerTotals]:
    return {one.worker: one.info.tally for one in snapshot.view.workers if one.info}


def throughput(before: WorkerTotals, now: WorkerTotals, seconds: float) -> Throughput:
    """The rate between two counts of one worker; a counter that decreased was reset."""
    finished = now.finished - (before.finished if before.finished <= now.finished else 0)
    tokens = now.tokens - (before.tokens if before.tokens <= now.tokens else 0)
    return Throughput(round(finished / seconds, 2), round(tokens / seconds, 1))


def _sum(rates: Iterable[Throughput]) -> Throughput:
    each = list(rates)
    return Throughput(
        round(sum(rate.requests_per_s for rate in each), 2),
        round(sum(rate.tokens_per_s for rate in each), 1),
    )


def _median(tallies: Mapping[str, WorkerTotals]) -> float | None:
    known = [tally.ttft_ms for tally in tallies.values() if tally.ttft_ms is not None]
    return round(statistics.median(known), 1) if known else None


class LineHistory:
    """The line as it was seen in the last minute, by several threads."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, TenantLine]] = deque()
        self._lock = threading.Lock()

    def shares(self, line: TenantLine, at_ms: int) -> dict[str, float]:
        """Add the line; the share of tokens of each tenant since the oldest that is kept."""
        with self._lock:
            if self._seen and at_ms < self._seen[-1][0]:  # the clock was set back
                self._seen.clear()
            if not self._seen or at_ms - self._seen[-1][0] >= SHARES_MS / _LINES:
                self._seen.append((at_ms, line))
            while at_ms - self._seen[0][0] > SHARES_MS:
                self._seen.popleft()
            return shares_between(self._seen[0][1], line)


class SnapshotHistory:
    """The latest snapshots, the newest last."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot; if the clock was set back, the older ones are dropped."""
        if self._snapshots and snapshot.at_ms < self._snapshots[-1].at_ms:
            self._snapshots.clear()
        self._snapshots.append(snapshot)

    @property
    def last(self) -> Snapshot | None:
        """The newest."""
        return self._snapshots[-1] if self._snapshots else None

    def rates(self) -> YardRates | None:
        """The rates over the last seconds; None if there is only one snapshot."""
        *earlier, now = self._snapshots
        if not earlier:
            return None
        recent = (snapshot for snapshot in earlier if now.at_ms - snapshot.at_ms <= SMOOTH_MS)
        return rates_between(next(recent, earlier[-1]), now)

    def tenant_shares(self) -> dict[str, float]:
        """The share of tokens of each tenant in line over the last minute, as far as seen."""
        *earlier, now = self._snapshots
        if not earlier:
            return {}
        recent = (snapshot for snapshot in earlier if now.at_ms - snapshot.at_ms <= SHARES_MS)
        return shares_between(next(recent, earlier[-1]).line, now.line)

    def depths(self, name: IntakeClass, most: int) -> list[int]:
        """The depth of an intake in the last snapshots, the newest last."""
        return [snapshot.view.waiting[name] for snapshot in self._snapshots][-most:]
