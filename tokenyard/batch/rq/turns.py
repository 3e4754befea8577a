"""Tenants' batches in fair turns: which of the waiting jobs a worker takes next.

The broker hands out the head of the queue. Before it takes a job, a worker moves there the first
one of the tenant whose last turn was longest ago; the jobs of no tenant have their turns together.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job

from tokenyard import clock
from tokenyard.batch.rq.jobs import KnownJob

#: Jobs at the head of the queue whose tenants are looked at.
_MOST: Final = 10_000
#: Who had no turn for so long is next, as who never had one.
_KEEP_S: Final = 24 * 3600


class Turns:
    """The turns of one queue, as one worker sees and gives them."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._run: Any = queue.connection
        self._key = f"rq:turns:{queue.name}"  # tenants by the time of their last turn
        self._tenants: dict[bytes, str] = {}  # of the jobs that wait

    def arrange(self) -> None:
        """Move the job whose turn it is to the head of the queue."""
        waiting: list[bytes] = self._run.lrange(self._queue.key, 0, _MOST - 1)
        known = self._tenants
        self._tenants = {
            name: known[name] if name in known else self._tenant_of(name) for name in waiting
        }
        tenants = sorted(set(self._tenants.values()))
        if len(tenants) < 2:
            return
        with contextlib.suppress(redis.ResponseError):  # whoever reaches the server may write here
            turns = dict(zip(tenants, self._run.zmscore(self._key, tenants), strict=True))
            name = min(waiting, key=lambda one: turns[self._tenants[one]] or 0.0)
            self._run.transaction(lambda pipe: self._move(pipe, name), self._queue.key)

    def _move(self, pipe: Any, name: bytes) -> None:
        is_waiting = pipe.lpos(self._queue.key, name) is not None  # no other worker took it
        pipe.multi()
        if is_waiting:
            pipe.lrem(self._queue.key, 1, name)
            pipe.lpush(self._queue.key, name)

    def took(self, job: Job) -> None:
        """Note that a tenant had its turn."""
        if not isinstance(job, KnownJob):
            return
        now = clock.wall()
        with contextlib.suppress(redis.ResponseError):
            pipe = self._run.pipeline()
            pipe.zadd(self._key, {job.order.spec.tenant: now})
            pipe.zremrangebyscore(self._key, "-inf", now - _KEEP_S)
            pipe.expire(self._key, _KEEP_S)
            pipe.execute()

    def _tenant_of(self, name: bytes) -> str:
        """The tenant of a job; "" where it is no batch job."""
        try:
            job = KnownJob.fetch(name.decode(), connection=self._queue.connection)
        except (NoSuchJobError, ValueError):
            return ""
        return job.order.spec.tenant
