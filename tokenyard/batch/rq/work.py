"""Runs a batch job in RQ's worker."""

from __future__ import annotations

import contextlib
import datetime
import logging
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any, ClassVar, Final

import msgspec
from rq import Retry, get_current_job
from rq.job import Job
from rq.timeouts import JobTimeoutException

from tokenyard.batch.asking import PATIENCE_S, AskingFactory, WaitsForLimit, by_client
from tokenyard.batch.outputs import OutputInUse
from tokenyard.batch.rq.jobs import CANCEL_FIELD, BatchQueue, JobOrder
from tokenyard.batch.rq.schedule import next_time, now, spec_at
from tokenyard.batch.runner import Runner
from tokenyard.batch.state import Batch, BatchSpec
from tokenyard.process.logs import HarmlessFormatter
from tokenyard.protocol.errors import PermanentError, SettingsError, TokenyardError

#: How long to wait for an earlier process of the same job to end.
_LOCK_WITHIN_S: Final = 20.0
#: RQ limits how often a job requeues itself; a stopped worker is no reason to fail.
_UNLIMITED: Final = 1_000_000

_log = logging.getLogger("tokenyard.batch")


class JobEnded(TokenyardError):
    """A job was cancelled or expired; RQ records a failure and does not retry."""


class Stopped(BaseException):
    """The worker is being stopped; not an `Exception`, so that no handler catches it."""


class StopIgnored(Exception):
    """The worker is being stopped, and something in the job has ignored `Stopped`."""


class WorkerContext:
    """The yard of this worker; set before RQ forks, so that the child inherits it."""

    url = ""
    yard = ""
    is_stopping = False  # in the child: SIGTERM has come
    #: For batches of gateways, as a gateway has them.
    model_paths: ClassVar[Mapping[str, str]] = {}
    trust_remote_code = False
    allowed_media_domains: ClassVar[Collection[str]] = ()
    runs_commands = True  # else the end of a job is only told to URLs
    #: Names of environment variables that imports have set; commands of users do not get them.
    variables_of_imports: ClassVar[set[str]] = set()


def perform(order: dict[str, Any]) -> Any:
    """Run the lines of a job that are not done; RQ calls this."""
    return carry_out(msgspec.convert(order, JobOrder))


def carry_out(
    order: JobOrder,
    asking: AskingFactory | None = None,
    *,
    keep: Callable[[], None] = lambda: None,
    publish: Callable[[], None] = lambda: None,
) -> Any:
    """Carry out RQ's current job: the batch object, or RQ's `Retry` if the worker is being stopped.

    ``keep`` is called about once a second while it runs, by either of two threads, and ``publish``
    once every line has its answer.
    """
    job = get_current_job()
    if job is None or not WorkerContext.url:
        raise RuntimeError("batch jobs are run by `tokenyard batch worker`")
    with _logged(order.spec):
        _enqueue_next(job, order)
        try:
            with _stoppable():
                return _Try(job, order, keep).run(asking, publish)
        except Stopped:
            _log.info("job %s: the worker stops; another one continues", job.id)
            return Retry(_UNLIMITED)
        except WaitsForLimit as limit:
            _log.info("job %s: continues in %d s: %s", job.id, limit.pause_s, limit)
            job.meta["limit"] = str(limit)
            job.save_meta()  # type: ignore[no-untyped-call]
            return Retry(_UNLIMITED, limit.pause_s)


class _Try:
    """One try of a job; it keeps RQ's record up to date."""

    def __init__(self, job: Job, order: JobOrder, keep: Callable[[], None]) -> None:
        self._job = job
        self._order = order
        self._keep = keep
        before = job.meta["request_counts"]
        self._done_before = before["completed"] + before["failed"]
        job.meta.pop("limit", None)

    def run(self, asking: AskingFactory | None, publish: Callable[[], None]) -> dict[str, Any]:
        """Run it to its end; the batch object.

        Raises `JobEnded` for one that did not complete, so that RQ starts none that depends on it.
        """
        yard = WorkerContext.url, WorkerContext.yard
        runner = Runner(
            *yard,
            self._order.spec,
            asking=asking or by_client(*yard, patience_s=PATIENCE_S),
            on_progress=self._update,
            is_cancelled=self._is_cancelled,
        )
        try:
            state = runner.run(
                job_id=self._job.id,
                overwrite=self._order.overwrite,
                retry=self._job.meta.get("retry", ""),
                lock_within_s=_LOCK_WITHIN_S,
            )
            publish()
        except StopIgnored:
            raise Stopped from None
        except Exception as error:
            self._failed(error)
            raise
        self._job.meta.pop("message", None)
        self._save_meta()
        if state.status != "completed":
            self._job.retries_left = 0
            raise JobEnded(f"the job is {state.status}: {state.counts}")
        described: dict[str, Any] = msgspec.to_builtins(state.as_batch())
        return described

    def _save_meta(self) -> None:
        untyped: Any = self._job
        untyped.save_meta()

    def _is_cancelled(self) -> bool:
        """Another thread calls it, and raises the error in that of the job."""
        if WorkerContext.is_stopping:  # Python ignores what is raised in a destructor
            raise StopIgnored
        return bool(self._job.connection.hexists(self._job.key, CANCEL_FIELD))

    def _update(self, batch: Batch) -> None:
        """Store the progress; called by two threads."""
        self._job.meta |= msgspec.to_builtins(batch)
        self._save_meta()
        # Retries count from the last progress, because a long job may lose many workers.
        done = batch.request_counts.done
        if done > self._done_before and self._order.retries:
            self._done_before = done
            self._job.retries_left = self._order.retries
            self._job.connection.hset(self._job.key, "retries_left", self._order.retries)
        self._keep()

    def _failed(self, error: Exception) -> None:
        """Store the error, and whether RQ retries."""
        _log.error("job %s: %s: %s", self._job.id, type(error).__name__, error)
        is_permanent = isinstance(error, PermanentError | JobTimeoutException)
        if is_permanent and not isinstance(error, OutputInUse):
            self._job.retries_left = 0
        is_last = not self._job.retries_left
        self._job.meta |= {
            "status": "failed" if is_last else "in_progress",
            "message": str(error) or type(error).__name__,
        }
        self._save_meta()


def _enqueue_next(job: Job, order: JobOrder) -> None:
    """Enqueue the next job of a schedule, once however often this one is retried."""
    if not order.cron or order.cron_spec is None:
        return
    # A clock that is behind, or set back, does not make this job due again.
    due_before = datetime.datetime.fromtimestamp(order.cron_due, datetime.UTC)
    due = next_time(order.cron, max(now(), due_before))
    # Named by its time, so that two tries of this job enqueue the same one.
    name = f"{job.id.partition('-')[0]}-{due.astimezone(datetime.UTC):%Y%m%dT%H%M%S}"
    if Job.exists(name, job.connection):
        return
    try:
        spec = spec_at(order.cron_spec, due)
    except SettingsError as error:
        _log.error("job %s: the schedule ends: %s", job.id, error)
        return
    successor = msgspec.structs.replace(order, spec=spec, cron_due=due.timestamp())
    BatchQueue(job.connection, WorkerContext.yard).enqueue(successor, job_id=name, at=due)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM stop the job; outside, the child of RQ's worker only records it."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        WorkerContext.is_stopping = True
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        if WorkerContext.is_stopping:
            raise Stopped
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _logged(spec: BatchSpec) -> Iterator[None]:
    """Log to the job's own file as well."""
    try:
        handler = logging.FileHandler(spec.log_path)
    except OSError as error:
        _log.warning("%s: %s; the job has no log", spec.log_path, error)
        yield
        return
    handler.setFormatter(HarmlessFormatter())
    logger = logging.getLogger("tokenyard")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
