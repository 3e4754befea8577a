"""The yard's history: what the leaders have written each 10 s, for the last hour.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final

from tokenyard.protocol.history import EVERY_MS, HistorySample, parse_history
from tokenyard.protocol.yard import Yard

HOUR_MS: Final = 3_600_000
#: A rate of now is that of the entries of so long.
LATELY_MS: Final = 60_000
#: A leader that waits for requests writes so much later.
_LATE_MS: Final = 2_000


def read_history(yard: Yard, now_ms: int, span_ms: int = HOUR_MS) -> list[HistorySample]:
    """The entries of the time before ``now_ms``, by the server's clock; the newest is last."""
    found: Any = yard.connection.xrange(yard.keys.history, max(0, now_ms - span_ms))
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
    newest = samples[-1]
    return HistorySample(
        at_ms=newest.at_ms,
        waiting=newest.waiting,
        of_tenants=newest.of_tenants,
        epoch=newest.epoch,
        running=newest.running,
        workers=newest.workers,
        ready=newest.ready,
        seconds=sum(one.seconds for one in samples),
        finished=sum(one.finished for one in samples),
        failed=sum(one.failed for one in samples),
        tokens=sum(one.tokens for one in samples),
        dead=sum(one.dead for one in samples),
        ttft=_sum([one.ttft for one in samples]),
        wait=_sum([one.wait for one in samples]),
    )


def _sum(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip_longest(*lists, fillvalue=0)]
