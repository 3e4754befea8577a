"""RQ's worker for batch jobs: JSON only, and dead colleagues are noticed at once.

It forks for each job, as RQ's `Worker` does: nothing in this process touches a GPU, and the parent
says that the job is alive while the child runs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from types import FrameType
from typing import Any, Final

import redis
from rq import Queue, Worker
from rq.exceptions import SchedulerNotFound
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker

# Imported before RQ forks, so that a job starts at once.
from tokenyard.batch.jobs import queue_name
from tokenyard.batch.work import Bench
from tokenyard.process.children import bind_forked_children

#: How often a running job says that it is alive: RQ gives it up a minute after the last time.
_MONITOR_S: Final = 5
_MAINTAIN_S: Final = 30
#: RQ looks after its queue between two waits for a job, which are 15 s shorter than this.
_WORKER_TTL_S: Final = 45

_log = logging.getLogger("tokenyard.batch")


class BatchWorker(Worker):
    """Runs the batch jobs of one yard, one at a time."""

    def __init__(self, url: str, yard: str, connection: redis.Redis, name: str = "") -> None:
        Bench.url, Bench.yard = url, yard
        super().__init__(
            [queue_name(yard)],
            name=name or None,
            connection=connection,
            serializer=JSONSerializer,
            job_monitoring_interval=_MONITOR_S,
            maintenance_interval=_MAINTAIN_S,
            worker_ttl=_WORKER_TTL_S,
        )

    def clean_registries(self) -> None:
        """As RQ does it, but without waiting for the heartbeat of who is dead on this host."""
        for queue in self.queues:
            self._give_up_dead(queue)
        super().clean_registries()  # type: ignore[no-untyped-call]

    def _give_up_dead(self, queue: Queue) -> None:
        registry = queue.started_job_registry
        for entry in registry.connection.zrange(registry.key, 0, -1):
            job_id = registry.parse_job_id(entry)
            worker = self._worker_of(job_id)
            if worker is None or worker.name == self.name:
                continue
            if is_dead_here(worker.hostname, worker.pid):
                _log.warning("worker %s is dead; its job %s goes on", worker.name, job_id)
                registry.connection.zadd(registry.key, {entry: 1}, xx=True)
                untyped: Any = worker
                untyped.register_death()

    def _worker_of(self, job_id: str) -> BaseWorker | None:
        name: Any = self.connection.hget(Job.key_for(job_id), "worker_name")
        if not name:
            return None
        key = f"{self.redis_worker_namespace_prefix}{name.decode()}"
        return Worker.find_by_key(key, connection=self.connection, serializer=JSONSerializer)

    def _start_scheduler(self, *arguments: Any, **options: Any) -> None:
        """As RQ does it, but a dead worker's scheduler does not stand in the way for a minute."""
        for queue in self.queues:
            key = RQScheduler.get_locking_key(queue.name)
            owner: Any = self.connection.get(key)
            if owner and self._is_dead_scheduler(owner.decode()):
                self.connection.delete(key)
        super()._start_scheduler(*arguments, **options)

    def _is_dead_scheduler(self, name: str) -> bool:
        try:
            scheduler = RQScheduler.fetch(name, self.connection)
        except SchedulerNotFound:
            return False
        return is_dead_here(scheduler.hostname, scheduler.pid)

    def setup_work_horse_signals(self) -> None:
        """The child takes note of SIGTERM; only while the job itself runs it obeys."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _take_note)

    def handle_warm_shutdown_request(self) -> None:
        """SIGTERM: the job that runs hands itself back, and the next worker goes on with it."""
        _log.info("worker %s stops", self.name)
        if self.horse_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)


def _take_note(_number: int, _frame: FrameType | None) -> None:
    Bench.is_stopping = True


def is_dead_here(hostname: str | None, pid: int | None) -> bool:
    """Whether a process of this host is dead; False of other hosts, of which we cannot tell."""
    if hostname != socket.gethostname() or not pid:
        return False
    if pid == os.getpid():
        return True  # a container that was started again gives the same number to another
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def run_worker(
    url: str, yard: str, connection: redis.Redis, *, name: str = "", burst: bool = False
) -> bool:
    """Run jobs until stopped, or with ``burst`` until none is left; whether any was run."""
    # The job's process and RQ's scheduler: a job without its worker would run beside its successor.
    bind_forked_children()
    options: dict[str, Any] = {"burst": burst, "with_scheduler": True}
    return bool(BatchWorker(url, yard, connection, name).work(**options))
