"""A yard over time: snapshots, the rates between two of them, and what the leaders have written.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import statistics
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from tokenyard.protocol.keys import IntakeClass, Yard
from tokenyard.protocol.leader_reports import EVERY_MS, HistorySample, parse_history
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.telemetry.metrics import summed
from tokenyard.telemetry.queues import read_oldest_ms
from tokenyard.yard.letters import WholeLetter, dead_letters
from tokenyard.yard.line import NOBODY, TenantLine, read_line, shares_between
from tokenyard.yard.snapshot import YardView, read_yard

T = TypeVar("T")

#: Dead letters in a snapshot.
LETTERS: Final = 3
#: Time that rates are taken over; workers report about once a second.
SMOOTH_MS: Final = 5000.0
#: Time that shares of tenants are taken over: requests are charged in lumps.
SHARES_MS: Final = 60_000.0
#: Something that was seen earlier says nothing about now.
OLDEST_MS: Final = 120_000
#: Things of which looks are kept.
_MOST_THINGS: Final = 512
#: Snapshots in a history.
MAX_SNAPSHOTS: Final = 600


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A yard at one moment."""

    view: YardView
    at_ms: int  # the server's clock
    oldest_ms: dict[IntakeClass, int]  # age of the oldest request of each class
    letters: Sequence[WholeLetter] = ()  # the newest
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
    """Read a snapshot."""
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
    later = tallies(now.view)
    workers = worker_rates(tallies(before.view), later, seconds)
    held = {one.worker: one.info.model for one in now.view.workers if one.info}
    models = {
        model: _sum(rate for worker, rate in workers.items() if held[worker] == model)
        for model in sorted(set(held.values()) - {""})
    }
    return YardRates(seconds, _sum(workers.values()), workers, models, _median_ttft(later.values()))


def tallies(view: YardView) -> Mapping[str, WorkerTotals]:
    """What each worker has done, by its name and incarnation."""
    return {one.worker: one.info.tally for one in view.workers if one.info}


def worker_rates(
    before: Mapping[str, WorkerTotals], now: Mapping[str, WorkerTotals], seconds: float
) -> dict[str, Throughput]:
    """The rate of each worker; all work of a new one counts."""
    nothing = WorkerTotals()
    return {one: _throughput(before.get(one, nothing), done, seconds) for one, done in now.items()}


def _throughput(before: WorkerTotals, now: WorkerTotals, seconds: float) -> Throughput:
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


def _median_ttft(done: Iterable[WorkerTotals]) -> float | None:
    known = [one.ttft_ms for one in done if one.ttft_ms is not None]
    return round(statistics.median(known), 1) if known else None


class RecentSamples(Generic[T]):
    """Samples of several things, taken lately by several threads; bounded."""

    def __init__(self, span_ms: int, apart_ms: int, least_ms: int = 1) -> None:
        self._span_ms = span_ms
        self._apart_ms = apart_ms  # closer ones share one
        self._least_ms = least_ms  # in less time nothing can be seen
        self._lock = threading.Lock()
        self._seen: OrderedDict[Hashable, deque[tuple[int, T]]] = OrderedDict()

    def add(self, thing: Hashable, at_ms: int, value: T) -> tuple[float, T] | None:
        """Note what is seen now; what was seen before, and how many seconds ago.

        That is the oldest of the span, else the newest of the last minutes; None where nothing was
        seen then.
        """
        with self._lock:
            seen = self._seen.setdefault(thing, deque(maxlen=self._span_ms // self._apart_ms + 1))
            self._seen.move_to_end(thing)
            while len(self._seen) > _MOST_THINGS:
                self._seen.popitem(last=False)
            if seen and at_ms < seen[-1][0] - OLDEST_MS:
                seen.clear()  # the clock was set back
            usable = [one for one in seen if self._least_ms <= at_ms - one[0] <= OLDEST_MS]
            if not seen or at_ms - seen[-1][0] >= self._apart_ms:
                seen.append((at_ms, value))
        recent = (one for one in usable if at_ms - one[0] <= self._span_ms)
        before = next(recent, usable[-1] if usable else None)
        return before and ((at_ms - before[0]) / 1000, before[1])

    def forget(self, thing: Hashable) -> None:
        """Forget what was seen of a thing."""
        with self._lock:
            self._seen.pop(thing, None)


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
        before = self._before(SMOOTH_MS)
        return None if before is None else rates_between(before, self._snapshots[-1])

    def tenant_shares(self) -> dict[str, float]:
        """The share of tokens of each tenant in line over the last minute, as far as seen."""
        before = self._before(SHARES_MS)
        return {} if before is None else shares_between(before.line, self._snapshots[-1].line)

    def _before(self, span_ms: float) -> Snapshot | None:
        """The oldest snapshot of the span, else the last but one."""
        *earlier, now = self._snapshots
        recent = (one for one in earlier if now.at_ms - one.at_ms <= span_ms)
        return next(recent, earlier[-1] if earlier else None)

    def depths(self, name: IntakeClass, most: int) -> list[int]:
        """The depth of an intake in the last snapshots, the newest last."""
        return [snapshot.view.waiting[name] for snapshot in self._snapshots][-most:]


HOUR_MS: Final = 3_600_000
#: A rate of now is that of the entries of so long.
LATELY_MS: Final = 60_000
#: A leader that waits for requests writes so much later.
_LATE_MS: Final = 2_000


def read_history(yard: Yard, now_ms: int) -> list[HistorySample]:
    """The entries of the hour before ``now_ms``, by the server's clock; the newest is last."""
    found: Any = yard.connection.xrange(yard.keys.history, max(0, now_ms - HOUR_MS))
    return [parse_history(entry.decode(), fields) for entry, fields in found]


def lately(samples: Sequence[HistorySample], now_ms: int) -> HistorySample | None:
    """The entries of the last minute as one; None where there is none."""
    return joined([one for one in samples if one.at_ms > now_ms - LATELY_MS - EVERY_MS])


def by_time(
    samples: Iterable[HistorySample], now_ms: int, step_ms: int, span_ms: int = HOUR_MS
) -> list[HistorySample | None]:
    """A sample for each step; None where nobody has written any.

    The last step is the newest of which there should be an entry by ``now_ms``. Steps begin at
    whole numbers of their length, so that they are the same at the next look.
    """
    steps: defaultdict[int, list[HistorySample]] = defaultdict(list)
    for one in samples:
        # An entry is of the time before it.
        steps[(one.at_ms - EVERY_MS // 2) // step_ms].append(one)
    last = (now_ms - EVERY_MS - _LATE_MS) // step_ms
    return [joined(steps[at]) for at in range(last - span_ms // step_ms + 1, last + 1)]


def joined(samples: Sequence[HistorySample]) -> HistorySample | None:
    """Several samples as one: what ended, together; what was there, as in the newest."""
    if not samples:
        return None
    return msgspec.structs.replace(
        samples[-1],
        seconds=sum(one.seconds for one in samples),
        finished=sum(one.finished for one in samples),
        failed=sum(one.failed for one in samples),
        tokens=sum(one.tokens for one in samples),
        dead=sum(one.dead for one in samples),
        ttft=summed(one.ttft for one in samples),
        wait=summed(one.wait for one in samples),
    )


@dataclass(frozen=True, slots=True)
class RecentError:
    """A recent error."""

    at_ms: int
    where: str
    what: str


def recent_errors(view: YardView, letters: Sequence[WholeLetter]) -> list[RecentError]:
    """Dead letters, errors of workers, and models that could not be loaded; the newest first."""
    return sorted(_errors(view, letters), key=lambda one: one.at_ms, reverse=True)


def _errors(view: YardView, letters: Sequence[WholeLetter]) -> Iterator[RecentError]:
    for letter in letters:
        yield RecentError(
            letter.died_ms, letter.id or letter.letter, f"dead letter: {letter.reason}"
        )
    for worker in view.workers:
        if worker.info and worker.info.last_error:
            yield RecentError(worker.info.last_error_ms, worker.info.name, worker.info.last_error)
    for host in view.hosts:
        for model in host.models:
            if model.fault:
                yield RecentError(model.faulted_ms, host.name, f"{model.name}: {model.fault}")
