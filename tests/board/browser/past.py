"""An hour that a yard has behind it, so that its charts have something to show."""

from __future__ import annotations

import bisect
import math
import random
from typing import Any

import redis

from tokenyard.protocol.keys import Keys
from tokenyard.protocol.leader_reports import EVERY_MS, WAITING, HistorySample, history_fields
from tokenyard.telemetry.metrics import BUCKETS_S

MINUTES = 58


def write_hour(connection: redis.Redis, keys: Keys) -> None:
    """Write the samples of an hour, before any leader has written one."""
    seconds, _ = connection.time()
    by = random.Random(17)
    count = MINUTES * 60_000 // EVERY_MS
    pipeline: Any = connection.pipeline(transaction=False)
    for at in range(count):
        at_ms = 1000 * int(seconds) - (count - at) * EVERY_MS
        load = 0.55 + 0.25 * math.sin(at / 50) + 0.06 * by.random()
        flood = math.exp(-(((at - 250) / 18) ** 2))  # a burst that passes
        finished = round(120 * load + 60 * flood)
        waits = [
            by.lognormvariate(math.log(0.08 + 1.5 * load**6 + 6 * flood), 0.7) for _ in range(60)
        ]
        first = [by.lognormvariate(math.log(0.16 + 0.1 * load), 0.35) + one for one in waits]
        sample = HistorySample(
            at_ms=at_ms,
            waiting={},
            epoch=1,
            running=round(24 * load),
            workers=9,
            ready=4,
            seconds=EVERY_MS / 1000,
            finished=finished,
            failed=1 if by.random() < 0.03 + 0.2 * flood else 0,
            tokens=round(5200 * load * (1 + 0.05 * by.random())),
            ttft=_counted(first),
            wait=_counted(waits),
        )
        waiting = {
            f"{WAITING}normal": round(12 * load + 160 * flood),
            f"{WAITING}low": round(8 * load),
        }
        fields: Any = history_fields(sample) | waiting
        pipeline.xadd(keys.history, fields, id=f"{at_ms}-0")
    pipeline.execute()


def _counted(times_s: list[float]) -> list[int]:
    counts = [0] * (len(BUCKETS_S) + 1)
    for one in times_s:
        counts[bisect.bisect_left(BUCKETS_S, one)] += 1
    return counts
