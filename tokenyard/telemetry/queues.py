"""What waits: in the intakes, common ones and those of tenants, and at RQ.

Errors of redis-py pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from tokenyard import clock
from tokenyard.protocol.keys import (
    INTAKE_CLASSES,
    PRIORITY_CLASSES,
    TENANTS_WAITING,
    IntakeClass,
    Keys,
    PriorityClass,
    Yard,
    intake_name,
    is_tenant,
)
from tokenyard.protocol.streams import position, whole

#: Tenants that are looked at from each end of the line. The first are those that are passed over,
#: for want of room or at a limit; the last are those whose turn is the farthest away.
MOST_OF_LINE: Final = 16


def queue_depths(pipeline: Any, keys: Keys) -> None:
    """Queue the commands whose answers `depths_of` takes."""
    for name in INTAKE_CLASSES:
        pipeline.xlen(keys.intake(name))
    for name in PRIORITY_CLASSES:
        pipeline.hget(keys.tally, f"{TENANTS_WAITING}:{name}")


def depths_of(answers: Sequence[Any]) -> dict[IntakeClass, int]:
    """The number of requests that wait, by class."""
    depths = dict(zip(INTAKE_CLASSES, answers, strict=False))
    for name, of_tenants in zip(PRIORITY_CLASSES, answers[len(depths) :], strict=True):
        depths[name] += max(0, whole(of_tenants))
    return depths


def read_oldest_ms(yard: Yard, now_ms: float) -> dict[IntakeClass, int]:
    """The age of the oldest request by class; 0 where none waits.

    Of the tenants in line the first and the last `MOST_OF_LINE` are looked at: of a longer line
    somebody else's may be older.
    """
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for name in INTAKE_CLASSES:
        pipeline.xrange(yard.keys.intake(name), count=1)
    pipeline.zrange(yard.keys.line, 0, MOST_OF_LINE - 1)
    pipeline.zrange(yard.keys.line, -MOST_OF_LINE, -1)
    *firsts, front, back = pipeline.execute()
    oldest = {
        name: _age_ms(first, now_ms) for name, first in zip(INTAKE_CLASSES, firsts, strict=True)
    }
    tenants = {raw.decode(errors="replace") for raw in (*front, *back)}
    for ages in read_ages_ms(yard, tenants, now_ms).values():
        for name, age_ms in ages.items():
            oldest[name] = max(oldest[name], age_ms)
    return oldest


def read_ages_ms(
    yard: Yard, tenants: Iterable[str], now_ms: float
) -> dict[str, dict[PriorityClass, int]]:
    """The age of the first request of each tenant in each class; 0 where none waits."""
    names = [name for name in tenants if is_tenant(name)]
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for tenant in names:
        for priority_class in PRIORITY_CLASSES:
            pipeline.xrange(yard.keys.intake(intake_name(priority_class, tenant)), count=1)
    ages = iter([_age_ms(first, now_ms) for first in pipeline.execute()])
    return {
        tenant: {priority_class: next(ages) for priority_class in PRIORITY_CLASSES}
        for tenant in names
    }


def _age_ms(first: Sequence[Any], now_ms: float) -> int:
    """The age of the first entry; clients may choose ids, so it can be of the future."""
    return max(0, int(now_ms) - position(first[0][0].decode())[0]) if first else 0


# Batch jobs that wait at RQ, and workers for them; needs no RQ.


@dataclass(frozen=True, slots=True)
class BatchService:
    """The batch jobs of a yard that could run now, and the workers that run such jobs."""

    waiting: int  # in the queue, or scheduled for a time that has come
    workers: int

    @property
    def is_missing(self) -> bool:
        """Whether jobs wait and no worker is there."""
        return bool(self.waiting) and not self.workers


def queue_name(yard: str) -> str:
    """The RQ queue of a yard's batch jobs."""
    return f"tokenyard-{yard}"


def read_batch_service(connection: redis.Redis, yard: str) -> BatchService:
    """Read RQ's keys. Errors of redis-py pass, such as that of a user without the right."""
    queue = queue_name(yard)
    pipeline: Any = connection.pipeline(transaction=False)
    pipeline.llen(f"rq:queue:{queue}")
    pipeline.zcount(f"rq:scheduled:{queue}", "-inf", clock.wall())
    pipeline.smembers(f"rq:workers:{queue}")
    queued, due, workers = pipeline.execute()
    for key in workers:
        pipeline.exists(key)  # the set also names workers that were killed
    return BatchService(queued + due, sum(pipeline.execute()))
