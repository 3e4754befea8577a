"""How many batch jobs wait at RQ, and how many workers there are for them; needs no RQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from tokenyard import clock


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
