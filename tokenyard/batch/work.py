"""What RQ's worker does with a batch job."""

from __future__ import annotations

import contextlib
import datetime
import logging
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import msgspec
from rq import Retry, get_current_job
from rq.job import Job
from rq.timeouts import JobTimeoutException

from tokenyard.batch.jobs import (
    CANCEL_FIELD,
    BatchQueue,
    JobOrder,
)
from tokenyard.batch.outputs import OutputInUse
from tokenyard.batch.runner import Progress, Runner
from tokenyard.batch.schedule import next_time, spec_at
from tokenyard.batch.state import BatchSpec, BatchState
from tokenyard.protocol.errors import PermanentError, SettingsError, TokenyardError
from tokenyard.telemetry.logs import HarmlessFormatter

#: An earlier process of the same job may take a moment to be gone.
_LOCK_WITHIN_S: Final = 20.0
#: RQ counts how often a job hands itself back; it may do so as often as its worker is stopped.
_OFTEN: Final = 1_000_000

_log = logging.getLogger("tokenyard.batch")


class JobEnded(TokenyardError):
    """A job was cancelled or has expired: for RQ that is a failure without another try."""


class Stopped(BaseException):
    """The worker is being stopped. Nobody should take this for an error of the job."""


class Bench:
    """Where the worker runs its jobs; set before RQ forks, so that the child has it too."""

    url = ""
    yard = ""
    is_stopping = False  # in the child: SIGTERM came before the job itself runs


def perform(order: dict[str, Any]) -> Any:
    """Run a job, or what is left of it; RQ calls this.

    Returns the batch object, or RQ's `Retry` where the worker is being stopped.
    """
    job = get_current_job()
    if job is None or not Bench.url:
        raise RuntimeError("batch jobs are run by `tokenyard batch worker`")
    read = msgspec.convert(order, JobOrder)
    with _logged(read.spec):
        _hand_over_next(job, read)
        try:
            with _stoppable():
                return _run(job, read)
        except Stopped:
            _log.info("job %s: the worker stops; another goes on", job.id)
            return Retry(_OFTEN)


def _run(job: Job, order: JobOrder) -> dict[str, Any]:
    desk = _JobRecord(job, order)
    runner = Runner(
        Bench.url,
        Bench.yard,
        order.spec,
        on_progress=desk.note,
        is_cancelled=desk.is_cancelled,
    )
    try:
        state = runner.run(
            job_id=job.id,
            overwrite=order.overwrite,
            retry=job.meta.get("retry", ""),
            lock_within_s=_LOCK_WITHIN_S,
        )
    except Exception as fault:
        is_hopeless = isinstance(fault, PermanentError | JobTimeoutException)
        desk.failed(fault, is_hopeless=is_hopeless and not isinstance(fault, OutputInUse))
        raise
    desk.ended(state)
    return state.as_batch()


class _JobRecord:
    """Keeps RQ's record of one job up to date."""

    def __init__(self, job: Job, order: JobOrder) -> None:
        self._job = job
        self._order = order
        before = job.meta["request_counts"]
        self._done_before = before["completed"] + before["failed"]

    def _save_meta(self) -> None:
        untyped: Any = self._job
        untyped.save_meta()

    def is_cancelled(self) -> bool:
        """Whether somebody wants the job to end."""
        return bool(self._job.connection.hexists(self._job.key, CANCEL_FIELD))

    def note(self, progress: Progress) -> None:
        """Called now and then, by two threads."""
        times = self._job.meta.get("times", {})
        if progress.status != self._job.meta.get("status") or progress.status not in times:
            times = times | {progress.status: _now()}
        self._job.meta |= {
            "status": progress.status,
            "request_counts": msgspec.to_builtins(progress.counts),
            "lines_per_s": round(progress.per_s, 1),
            "eta_s": round(progress.eta_s, 1) if progress.eta_s is not None else None,
            "times": times,
        }
        self._save_meta()
        self._refill_retries(progress.counts.done)

    def _refill_retries(self, done: int) -> None:
        """Tries are counted from the last progress on: a long job may die many times."""
        if done > self._done_before and self._order.retries:
            self._done_before = done
            self._job.retries_left = self._order.retries
            self._job.connection.hset(self._job.key, "retries_left", self._order.retries)

    def failed(self, fault: Exception, *, is_hopeless: bool) -> None:
        """Say why, and whether RQ may try again."""
        _log.error("job %s: %s: %s", self._job.id, type(fault).__name__, fault)
        if is_hopeless:
            self._job.retries_left = 0
        is_last = not self._job.retries_left
        self._job.meta |= {
            "status": "failed" if is_last else "in_progress",
            "message": str(fault) or type(fault).__name__,
        }
        self._save_meta()

    def ended(self, state: BatchState) -> None:
        """A job that did not complete is a failure to RQ, so that none that waits for it runs."""
        self._job.meta.pop("message", None)
        self._save_meta()
        if state.status != "completed":
            self._job.retries_left = 0
            raise JobEnded(f"the job is {state.status}: {state.counts}")


def _hand_over_next(job: Job, order: JobOrder) -> None:
    """The job of a schedule hands over its successor, once however often it is tried."""
    if not order.cron or order.cron_spec is None:
        return
    due = next_time(order.cron)
    # Named by its time, so that two tries of this job hand over one and the same.
    name = f"{job.id.partition('-')[0]}-{due.astimezone(datetime.UTC):%Y%m%dT%H%M%S}"
    if Job.exists(name, job.connection):
        return
    try:
        spec = spec_at(order.cron_spec, due)
    except SettingsError as fault:
        _log.error("job %s: the schedule ends: %s", job.id, fault)
        return
    successor = msgspec.structs.replace(order, spec=spec)
    BatchQueue(job.connection, Bench.yard).hand_over(successor, job_id=name, at=due)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends the job in order; elsewhere the child of RQ's worker only takes note of it."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        if Bench.is_stopping:
            raise Stopped
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _logged(spec: BatchSpec) -> Iterator[None]:
    """What is logged meanwhile stands in the job's own file, too."""
    try:
        handler = logging.FileHandler(spec.log_path)
    except OSError as fault:
        _log.warning("%s: %s; the job has no log", spec.log_path, fault)
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


def _now() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()
