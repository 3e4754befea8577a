"""One look at a yard, with what `snapshot` leaves out, and the rates between two looks.

Reading is I/O; the rest is pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from tokenyard.admin.dead_letters import DeadLetter, dead_letters
from tokenyard.admin.snapshot import YardView, read_yard
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass, Keys
from tokenyard.protocol.worker_info import WorkerTotals

#: Dead letters that a look brings along.
LETTERS: Final = 3
#: Rates are taken over so long: workers say once a second what they have done.
SMOOTH_MS: Final = 5000.0
#: Looks that are kept, for the history of what waits.
MOST_LOOKS: Final = 600


@dataclass(frozen=True, slots=True)
class Look:
    """A yard at one moment."""

    view: YardView
    at_ms: int  # the server's clock
    oldest_ms: dict[IntakeClass, int]  # how long the first request of an intake has waited
    letters: Sequence[DeadLetter] = ()  # the newest

    @property
    def waiting(self) -> int:
        """Requests in all intakes."""
        return sum(self.view.waiting.values())


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast something is done."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a yard and each of its workers were between two looks."""

    seconds: float  # between the looks
    yard: Rate
    workers: dict[str, Rate]
    models: dict[str, Rate]
    ttft_ms: float | None  # median over the workers of their medians of the last minute


def read_look(connection: redis.Redis, keys: Keys) -> Look:
    """Look at a yard. Errors of redis-py pass, for `tokenyard.broker.connection.translated`."""
    view = read_yard(connection, keys)
    pipeline = connection.pipeline(transaction=False)
    pipeline.time()
    for name in INTAKE_CLASSES:
        pipeline.xrange(keys.intake(name), count=1)
    (seconds, micros), *firsts = pipeline.execute()
    now_ms = seconds * 1000 + micros // 1000
    return Look(
        view=view,
        at_ms=now_ms,
        oldest_ms={
            name: _age_ms(first, now_ms) for name, first in zip(INTAKE_CLASSES, firsts, strict=True)
        },
        letters=dead_letters(connection, keys, LETTERS) if view.dead else (),
    )


def _age_ms(entries: Any, now_ms: int) -> int:
    """Of the first of some entries; 0 where there is none."""
    if not entries:
        return 0
    return max(0, now_ms - int(entries[0][0].partition(b"-")[0]))


def rates_between(before: Look, now: Look) -> Rates:
    """How fast things were done between two looks.

    A worker that has joined since has done all that it says since then.
    """
    seconds = max(0.001, (now.at_ms - before.at_ms) / 1000)
    earlier, later = _tallies(before), _tallies(now)
    workers = {
        worker: _rate(earlier.get(worker, WorkerTotals()), tally, seconds)
        for worker, tally in later.items()
    }
    held = {one.worker: one.info.model for one in now.view.workers if one.info}
    models = {
        model: _sum(rate for worker, rate in workers.items() if held[worker] == model)
        for model in sorted(set(held.values()) - {""})
    }
    return Rates(seconds, _sum(workers.values()), workers, models, _median(later))


def _tallies(look: Look) -> Mapping[str, WorkerTotals]:
    return {one.worker: one.info.tally for one in look.view.workers if one.info}


def _rate(before: WorkerTotals, now: WorkerTotals, seconds: float) -> Rate:
    """A count that has gone down has begun anew."""
    finished = now.finished - (before.finished if before.finished <= now.finished else 0)
    tokens = now.tokens - (before.tokens if before.tokens <= now.tokens else 0)
    return Rate(round(finished / seconds, 2), round(tokens / seconds, 1))


def _sum(rates: Iterable[Rate]) -> Rate:
    each = list(rates)
    return Rate(
        round(sum(rate.requests_per_s for rate in each), 2),
        round(sum(rate.tokens_per_s for rate in each), 1),
    )


def _median(tallies: Mapping[str, WorkerTotals]) -> float | None:
    known = [tally.ttft_ms for tally in tallies.values() if tally.ttft_ms is not None]
    return round(statistics.median(known), 1) if known else None


class SnapshotHistory:
    """The looks of the last while, the newest last."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=MOST_LOOKS)

    def add(self, look: Look) -> None:
        """One more; those before a clock that was set back are forgotten."""
        if self._looks and look.at_ms < self._looks[-1].at_ms:
            self._looks.clear()
        self._looks.append(look)

    @property
    def last(self) -> Look | None:
        """The newest."""
        return self._looks[-1] if self._looks else None

    def rates(self) -> Rates | None:
        """Over the last seconds, or since the look before; None where there is only one."""
        *earlier, now = self._looks
        if not earlier:
            return None
        recent = (look for look in earlier if now.at_ms - look.at_ms <= SMOOTH_MS)
        return rates_between(next(recent, earlier[-1]), now)

    def depths(self, name: IntakeClass, most: int) -> list[int]:
        """What waited in an intake at the last looks, the newest last."""
        return [look.view.waiting[name] for look in self._looks][-most:]
