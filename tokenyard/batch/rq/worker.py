"""RQ's worker for batch jobs, which uses JSON and detects dead workers of its host immediately.

It forks for each job, as RQ's `Worker` does: nothing in this process touches a GPU, and the parent
sends heartbeats while the child runs the job. What the jobs of gateways import is imported by the
parent before it forks for the first of them.
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
from rq.exceptions import DequeueTimeout, NoSuchJobError, SchedulerNotFound, StopRequested
from rq.job import Job, validate_job_id
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from rq.utils import get_version, import_attribute, now
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from tokenyard import clock
from tokenyard.batch.rq.jobs import FOLDER_PREFIX, MALFORMED, PERFORM_FOR_GATEWAYS, KnownJob
from tokenyard.batch.rq.taken import TakenJobs, WorkerQueue, refuse_foreign
from tokenyard.batch.rq.work import WorkerContext
from tokenyard.process.children import bind_forked_children
from tokenyard.process.home import remove_abandoned
from tokenyard.protocol.errors import SettingsError
from tokenyard.telemetry.queues import queue_name

#: Heartbeat of a running job; RQ abandons it a minute after the last one.
_MONITOR_S: Final = 5
#: The longest wait for a job, and so until an idle worker stops.
_WAIT_S: Final = 1
#: Between two looks at what others left.
_LOOK_EVERY_S: Final = 4
_CLEAN_EVERY_S: Final = 30
_WORKER_TTL_S: Final = 45
#: A worker that shows no heartbeat for so long is dead: RQ abandons its job then, too.
_DEAD_AFTER_S: Final = 65
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
#: Called in the parent before it forks for a job of this function.
_PREPARATIONS: Final = {PERFORM_FOR_GATEWAYS: "gateway.batches.work.prepare"}

_log = logging.getLogger("tokenyard.batch")


class BatchWorker(Worker):
    """Runs the batch jobs of one yard, one at a time."""

    def __init__(self, url: str, yard: str, connection: redis.Redis, name: str = "") -> None:
        WorkerContext.url, WorkerContext.yard = url, yard
        self._clean_at = clock.monotonic()
        super().__init__(
            [queue_name(yard)],
            name=name or None,
            connection=connection,
            serializer=JSONSerializer,
            job_class=KnownJob,
            queue_class=WorkerQueue,
            job_monitoring_interval=_MONITOR_S,
            maintenance_interval=_LOOK_EVERY_S,
            worker_ttl=_WORKER_TTL_S,
        )
        self._turns = Turns(self.queues[0])

    def register_birth(self) -> None:
        """As RQ does, in place of a dead worker of this name; raises `SettingsError` if it lives.

        One of another host, or whose process id another process has, is dead once it is silent.
        """
        since, seen = clock.monotonic(), None
        while (other := self._named(self.name)) is not None and other.death_date is None:
            if is_dead_here(other.hostname, other.pid) or clock.monotonic() - since > _DEAD_AFTER_S:
                _log.warning("worker %s: an earlier one of this name is dead", self.name)
                untyped: Any = other
                untyped.register_death()
                break
            if seen not in (None, other.last_heartbeat):
                where = f"process {other.pid} of host {other.hostname}"
                raise SettingsError([f"name {self.name!r}: {where} has it; give another --name"])
            if seen is None:
                _log.warning("worker %s: waits for a sign of the one that has its name", self.name)
            seen = other.last_heartbeat
            clock.sleep(_WAIT_S)
        super().register_birth()  # type: ignore[no-untyped-call]

    @property
    def dequeue_timeout(self) -> int:
        """Seconds."""
        return _WAIT_S

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """As RQ does, until this worker is to stop; None in a burst when no job is left."""
        del max_idle_time  # a worker of batch jobs has none
        self.set_state(WorkerStatus.IDLE)
        while not self._stop_requested:
            try:
                self.heartbeat()
                if self.should_run_maintenance_tasks:
                    self.run_maintenance_tasks()  # type: ignore[no-untyped-call]
                return self._take_job(timeout)
            except DequeueTimeout:
                continue
            except redis.ConnectionError as error:
                _log.error("worker %s tries again in %d s: %s", self.name, _WAIT_S, error)
                clock.sleep(_WAIT_S)
        raise StopRequested

    def _take_job(self, timeout: int | None) -> tuple[Job, Queue] | None:
        self._turns.arrange()
        taken = WorkerQueue.dequeue_any(
            self._ordered_queues, timeout, self.connection, KnownJob, JSONSerializer
        )
        if taken is None:
            return None
        job, queue = taken
        if self._stop_requested:
            TakenJobs(queue.key, self.connection).give_back(job.id, queue)
            raise StopRequested
        self._turns.took(job)
        job.redis_server_version = get_version(self.connection)
        _log.info("worker %s takes job %s: %s", self.name, job.id, job.description)
        return taken

    def clean_registries(self) -> None:
        """Every few seconds, take care of what others left; all that RQ cleans, every 30 s."""
        [queue] = self.queues
        try:
            _refuse_scheduled(queue)
            has_found_dead = self._abandon_jobs_of_dead_workers(queue)
            queue.intermediate_queue.cleanup(self, queue)
            if has_found_dead or clock.monotonic() >= self._clean_at:
                self._clean_at = clock.monotonic() + _CLEAN_EVERY_S
                super().clean_registries()  # type: ignore[no-untyped-call]
        except MALFORMED as error:
            _log.warning("what RQ keeps cannot all be read, nor cleaned: %r", error)
        self.last_cleaned_at: Any = now()

    def _abandon_jobs_of_dead_workers(self, queue: Queue) -> bool:
        """Do not wait for the heartbeats of dead workers of this host; whether there was one."""
        registry = queue.started_job_registry
        has_found = False
        for entry in registry.connection.zrange(registry.key, 0, -1):
            try:
                job_id = registry.parse_job_id(entry)
                validate_job_id(job_id)
            except ValueError:
                registry.connection.zrem(registry.key, entry)  # RQ's own cleaning ends at it
                continue
            name: Any = self.connection.hget(Job.key_for(job_id), "worker_name")
            worker = self._named(name.decode()) if name else None
            if worker is None:
                continue
            # This one is idle: an earlier one of its name had it.
            is_mine = worker.name == self.name
            if is_mine or is_dead_here(worker.hostname, worker.pid):
                _log.warning("worker %s is dead; its job %s continues", worker.name, job_id)
                registry.connection.zadd(registry.key, {entry: 1}, xx=True)
                if not is_mine:
                    untyped: Any = worker
                    untyped.register_death()
                has_found = True
        return has_found

    def _named(self, name: str) -> BaseWorker | None:
        key = f"{self.redis_worker_namespace_prefix}{name}"
        return Worker.find_by_key(key, connection=self.connection, serializer=JSONSerializer)

    def _start_scheduler(self, *arguments: Any, **options: Any) -> None:
        """As RQ does, but without waiting a minute for the lock of a dead worker."""
        [queue] = self.queues
        _refuse_scheduled(queue)
        key = RQScheduler.get_locking_key(queue.name)
        owner: Any = self.connection.get(key)
        with contextlib.suppress(SchedulerNotFound):
            scheduler = RQScheduler.fetch(owner.decode(), self.connection) if owner else None
            if scheduler is not None and is_dead_here(scheduler.hostname, scheduler.pid):
                self.connection.delete(key)
        super()._start_scheduler(*arguments, **options)

    def execute_job(self, job: Job, queue: Queue) -> None:
        """As RQ does, unless this worker was paused and its job returned to the queue."""
        if self.connection.lpos(queue.intermediate_queue_key, job.id) is None:
            _log.warning("job %s: another worker has it", job.id)
            return
        super().execute_job(job, queue)

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        """As RQ does, once this process has imported what the job needs."""
        if name := _PREPARATIONS.get(str(job.func_name)):
            # As the child does: it is to be cancelled as one that runs, and known to be this one's.
            self.prepare_job_execution(job, remove_from_intermediate_queue=True)
            _prepare(name)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # until the child has its handlers
        WorkerContext.is_stopping = self._stop_requested
        super().fork_work_horse(job, queue)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        if self._stop_requested:
            self._stop_job()  # another thread may have got SIGTERM before its process was known

    def setup_work_horse_signals(self) -> None:
        """The child records SIGTERM; it obeys only while the job itself runs."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _record_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)

    def handle_warm_shutdown_request(self) -> None:
        """SIGTERM: the running job requeues itself, and the next worker continues it."""
        self._stop_requested = True
        self._stop_job()
        _log.info("worker %s stops", self.name)

    def _stop_job(self) -> None:
        if self.horse_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)

    def _shutdown(self) -> None:
        """Leave it at that: this runs amid a command.

        RQ would raise an exception, which redis-py may ignore, or which leaves a connection with a
        reply that the next command takes for its own.
        """


def _refuse_scheduled(queue: Queue) -> None:
    """Refuse the foreign jobs whose time has come: one that cannot be read ends RQ's scheduler."""
    due: Any = queue.connection.zrangebyscore(
        queue.scheduled_job_registry.key, "-inf", clock.wall()
    )
    for name in due:
        refuse_foreign(queue, name)


def _prepare(name: str) -> None:
    before = set(os.environ)
    try:
        import_attribute(name)()
    except Exception as error:  # noqa: BLE001 - the job itself meets it again, and tells it
        _log.debug("%s: %r", name, error)
    WorkerContext.variables_of_imports |= set(os.environ) - before


def _record_stop(_number: int, _frame: FrameType | None) -> None:
    WorkerContext.is_stopping = True


def _forget_handlers_in_children() -> None:
    """A forked process has no handler of this one; a signal that comes as it starts is not lost."""
    masks: list[set[signal.Signals]] = []

    def block() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS))  # type: ignore[arg-type]

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def forget() -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=forget)


def is_dead_here(hostname: str | None, pid: int | None) -> bool:
    """Whether a process of this host is dead; False for other hosts."""
    if hostname != socket.gethostname() or not pid:
        return False
    if pid == os.getpid():
        return True  # a restarted container reuses pids
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
    """Run jobs until stopped, or with ``burst`` until none is left; whether any ran."""
    bind_forked_children()
    _forget_handlers_in_children()
    remove_abandoned(FOLDER_PREFIX)
    options: dict[str, Any] = {"burst": burst, "with_scheduler": True}
    return bool(BatchWorker(url, yard, connection, name).work(**options))


# Tenants' batches in fair turns: which of the waiting jobs a worker takes next.
#
# The broker hands out the head of the queue. Before it takes a job, a worker moves there the first
# one of the tenant whose last turn was longest ago; the jobs of no tenant have their turns
# together.

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
