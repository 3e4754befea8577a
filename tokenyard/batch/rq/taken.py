"""Returns jobs to the queue that a worker took and did not begin.

The broker moves a job from the queue to RQ's intermediate queue when it hands it to a worker, which
then enters it in the registry of started jobs. A worker that is killed, paused or stopped in
between leaves it there. RQ alone would find it after more than a minute, count a try, and fail a
job without tries left, even one that was requeued or has ended since.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.worker import BaseWorker

from tokenyard import clock
from tokenyard.batch.rq.jobs import KEEP_S, ForeignJob, KnownJob

#: A worker that took a job enters it in the registry within milliseconds.
GRACE_S: Final = 4.0
#: The others wait elsewhere or are over, so what is left of them here is of an earlier try.
_TO_BE_RUN: Final = (JobStatus.QUEUED, JobStatus.STARTED)

_log = logging.getLogger("tokenyard.batch")


class TakenJobs(IntermediateQueue):
    """The jobs that are neither in the queue nor begun, as one worker sees them."""

    def __init__(self, queue_key: str, connection: redis.Redis) -> None:
        super().__init__(queue_key, connection)
        self._seen: dict[str, float] = {}

    def cleanup(self, worker: BaseWorker, queue: Queue) -> None:
        """Return jobs that have been here since an earlier call, `GRACE_S` ago or longer."""
        del worker
        names: Any = self.connection.lrange(self.key, 0, -1)
        taken = [name.decode() for name in names if not refuse_foreign(queue, name)]
        started = set(queue.started_job_registry.get_job_ids(cleanup=False)) if taken else set()
        now = clock.monotonic()
        self._seen = {one: self._seen.get(one, now) for one in taken if one not in started}
        for job_id, since in self._seen.items():
            if now - since >= GRACE_S:
                self.give_back(job_id, queue)

    def give_back(self, job_id: str, queue: Queue) -> None:
        """Return a job that is to be run, and is in no other place."""
        keys = (self.key, self.queue_key, Job.key_for(job_id), queue.started_job_registry.key)

        def move(transaction: Any) -> None:
            is_lost = self._is_lost(job_id, queue)
            transaction.multi()
            transaction.lrem(self.key, 1, job_id)
            if is_lost:
                transaction.lpush(self.queue_key, job_id)
                _log.warning("job %s: a worker took it and did not begin; it waits again", job_id)

        self.connection.transaction(move, *keys)

    def _is_lost(self, job_id: str, queue: Queue) -> bool:
        """Whether a job is to be run, but is in no other place."""
        job = queue.fetch_job(job_id)
        is_elsewhere = (
            self.connection.lpos(self.queue_key, job_id) is not None
            or job_id in queue.started_job_registry
        )
        return job is not None and job.get_status() in _TO_BE_RUN and not is_elsewhere


class WorkerQueue(Queue):
    """A queue as a worker has it, which remembers when it saw the jobs that were taken."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._taken = TakenJobs(self.key, self.connection)

    @property
    def intermediate_queue(self) -> TakenJobs:
        """As RQ's, but with a memory."""
        return self._taken

    @classmethod
    def lmove(cls, connection: redis.Redis, queue_key: str, timeout: int | None) -> Any:
        """As RQ does, until it is a batch job."""
        queue = cls.from_queue_key(queue_key, connection=connection, job_class=KnownJob)
        while (moved := super().lmove(connection, queue_key, timeout)) is not None:
            if not refuse_foreign(queue, moved[1]):
                break
        return moved


def refuse_foreign(queue: Queue, name: bytes | str) -> bool:
    """Move a job that is no batch job to the failed ones, and log it; whether it was one."""
    try:
        text = name.decode() if isinstance(name, bytes) else name
        KnownJob.fetch(text, connection=queue.connection)
    except ForeignJob as error:
        why, is_listed = str(error), True
    except NoSuchJobError:
        return False  # deleted; RQ passes over it
    except ValueError:
        why, is_listed = "has no valid name", False
    else:
        return False
    _log.warning("job %r is refused: it %s", name, why)
    pipeline: Any = queue.connection.pipeline(transaction=False)
    pipeline.lrem(IntermediateQueue.get_intermediate_queue_key(queue.key), 0, name)
    pipeline.zrem(queue.scheduled_job_registry.key, name)
    if is_listed:
        pipeline.zadd(queue.failed_job_registry.key, {name: clock.wall() + KEEP_S})
        pipeline.expire(Job.key_for(text), KEEP_S)
    pipeline.execute()
    return True
