"""Submits, describes, cancels and resumes batch jobs at RQ.

RQ provides the queue, retries, time-outs, dependencies and schedules; all that it stores is JSON. A
job's progress is in its ``meta``, as the batch object has it, so RQ's own tools show it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack, cast

import msgspec
import redis
from msgspec import Struct
from rq import Callback, Queue, Retry
from rq.exceptions import DeserializationError, InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import BaseRegistry
from rq.serializers import JSONSerializer

from tokenyard import clock
from tokenyard.batch.api import BatchOptions, spec_of
from tokenyard.batch.rq.schedule import first_spec
from tokenyard.batch.state import DEFAULT_RETRIES, ENDED, Batch, BatchSpec, RequestCounts, new_id
from tokenyard.broker.connection import connected
from tokenyard.broker.url import batch_url
from tokenyard.client.sync import DEFAULT_RESULT_TIMEOUT_S
from tokenyard.protocol.errors import PermanentError, SettingsError, WaitTimeout
from tokenyard.protocol.keys import NAME_RULE, is_name
from tokenyard.protocol.texts import counted, local_time
from tokenyard.telemetry.queues import queue_name, read_batch_service

#: Functions that RQ's worker calls, by name, so that submitting does not import them.
_PERFORM: Final = "tokenyard.batch.rq.work.perform"
#: For batches of a gateway, whose lines are asked by its front end.
PERFORM_FOR_GATEWAYS: Final = "gateway.batches.work.perform"
#: The functions of batch jobs; the worker calls no other.
_FUNCTIONS: Final = frozenset({_PERFORM, PERFORM_FOR_GATEWAYS})
#: Temporary folders of jobs whose storage cannot append.
FOLDER_PREFIX: Final = "tokenyard-batch-"
_SUCCEEDED: Final = "tokenyard.batch.rq.callbacks.succeeded"
_FAILED: Final = "tokenyard.batch.rq.callbacks.failed"
#: A field of RQ's hash of a job: when cancellation was requested, in unix seconds.
CANCEL_FIELD: Final = "tokenyard_cancel"
#: How long RQ keeps jobs that are over.
KEEP_S: Final = 30 * 24 * 3600
CALLBACK_TIMEOUT_S: Final = 120
#: Pauses before the retries of a failed job, in seconds.
_PAUSES: Final = (0, 10, 30, 60, 120)
#: Workers give signs of life every five seconds; RQ waits for a minute.
_SILENT: Final = datetime.timedelta(minutes=2)
_LOOK_EVERY_S: Final = 0.5
_LONGEST_NAME: Final = 80
#: What RQ raises for a job that was written or changed by somebody else.
MALFORMED: Final = (
    ArithmeticError,
    AttributeError,
    DeserializationError,
    LookupError,
    NoSuchJobError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
    zlib.error,
)


class UnknownJob(PermanentError):
    """RQ has no such batch job of this yard, or no longer."""


class JobOrder(Struct, frozen=True, kw_only=True):
    """The arguments of a job for RQ's worker; JSON. Paths are absolute."""

    spec: BatchSpec
    overwrite: bool = False
    retries: int = DEFAULT_RETRIES
    timeout_s: int = 0
    on_success: str = ""
    on_failure: str = ""
    #: A schedule; ``cron_spec`` has the file names with their placeholders, see `schedule`.
    cron: str = ""
    cron_spec: BatchSpec | None = None
    cron_due: float = 0.0  # when this job of it is due, in unix seconds


class ForeignJob(NoSuchJobError):
    """Somebody else wrote this job; the text continues "the job ...". To RQ the job is missing."""


class KnownJob(Job):
    """A job that can only be a batch job: no pickle, no other function, call-back or web hook.

    Whoever may write to RQ's keys could otherwise run any function in the worker. All of RQ's
    classes read jobs by this one, so that none can exist which was not checked.
    """

    order: JobOrder

    @property
    def dependencies(self) -> list[str]:
        """The jobs that must have succeeded before it."""
        names: list[str] = self._dependency_ids
        return names

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments[:2], **options | {"serializer": JSONSerializer})

    def restore(self, raw_data: Any) -> None:
        """As RQ does; raises `ForeignJob`."""
        try:
            super().restore(raw_data)
            if why := self._why_foreign():
                raise ForeignJob(why)
            self.order = msgspec.convert(self.kwargs["order"], JobOrder)
        except ForeignJob:
            raise
        except MALFORMED as error:
            raise ForeignJob("cannot be read") from error

    def _why_foreign(self) -> str:
        called = [self.func_name, self._success_callback_name, self._failure_callback_name]
        for name, known in zip(called, (_FUNCTIONS, {_SUCCEEDED}, {_FAILED}), strict=True):
            if name not in known and (name is not None or known is _FUNCTIONS):
                return f"calls {str(name)[:_LONGEST_NAME]!r}, which is no function of batch jobs"
        if self.instance is not None or self._stopped_callback_name or self.webhooks:
            return "has parts that no batch job has"
        meta: Any = self.meta
        return "" if isinstance(meta, dict) else "cannot be read"

    @classmethod
    def fetch(cls, *arguments: Any, **options: Any) -> KnownJob:
        """As RQ does; raises `ForeignJob`."""
        try:
            return cast(KnownJob, super().fetch(*arguments, **options))
        except redis.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            raise ForeignJob("cannot be read") from error

    @classmethod
    def fetch_many(
        cls, job_ids: Iterable[str], connection: redis.Redis, serializer: Any = None
    ) -> list[Job | None]:
        """As RQ does; None for a foreign job."""
        found: list[Job | None] = []
        for job_id in job_ids:
            try:
                found.append(cls.fetch(job_id, connection, serializer))
            except NoSuchJobError:
                found.append(None)
        return found


class BatchQueue:
    """The batch jobs of one yard at RQ. Errors of redis-py pass, for `translated`."""

    def __init__(self, connection: redis.Redis, yard: str) -> None:
        if not is_name(yard):
            raise SettingsError([f"yard {yard!r}: {NAME_RULE}"])
        self.rq = Queue(
            queue_name(yard),
            connection=connection,
            serializer=JSONSerializer,
            job_class=KnownJob,
        )
        self._connection = connection
        self._yard = yard

    def enqueue(
        self,
        order: JobOrder,
        *,
        job_id: str = "",
        after: Sequence[str] = (),
        at: datetime.datetime | None = None,
        function: str = _PERFORM,
    ) -> Job:
        """Enqueue a job; raises `SettingsError`."""
        for name in after:
            if not Job.exists(name, self._connection):
                raise SettingsError([f"after: there is no job {name!r}"])
        if after and at is not None:
            raise SettingsError(["give either a job to wait for or a time"])
        options = _options(order, job_id or new_id())
        if at is not None:
            job: Job = self.rq.enqueue_at(at, function, **options)
            return job
        return self.rq.enqueue(function, depends_on=list(after) or None, **options)

    def find(self, job_id: str) -> KnownJob:
        """A batch job; raises `UnknownJob`."""
        try:
            job = KnownJob.fetch(job_id, connection=self._connection)
        except ForeignJob as error:
            raise UnknownJob(f"job {job_id!r} {error}") from error
        except (NoSuchJobError, ValueError) as error:
            raise UnknownJob(f"there is no batch job {job_id!r}, or not any more") from error
        if job.origin != self.rq.name:
            raise UnknownJob(f"{job_id!r} is not a batch job of this yard")
        return job

    @property
    def has_worker(self) -> bool:
        """Whether a batch worker is there."""
        return bool(read_batch_service(self._connection, self._yard).workers)

    def waits_for(self, job: KnownJob) -> str:
        """What a job waits for before it runs; "" if it runs or is over."""
        match job.get_status(refresh=False):
            case JobStatus.SCHEDULED:
                at = self.rq.scheduled_job_registry.get_scheduled_time(job)
                why = f"; {job.meta['limit']}" if "limit" in job.meta else ""
                return f"its time, {local_time(at.timestamp())}{why}"
            case JobStatus.DEFERRED:
                return f"the end of {', '.join(job.dependencies)}"
            case JobStatus.QUEUED if self.has_worker:
                return (
                    f"a batch worker, behind {counted(self.rq.get_job_position(job) or 0, 'job')}"
                )
            case JobStatus.STARTED if is_attended(job):
                return ""
            case JobStatus.QUEUED | JobStatus.STARTED:
                return "a batch worker, and none is there: start `tokenyard batch worker`"
        return ""

    def cancel(self, job: KnownJob) -> str:
        """Cancel a job; its new status: ``cancelling`` or ``cancelled``, or how it ended before."""
        self._connection.hsetnx(job.key, CANCEL_FIELD, str(int(clock.wall())))
        state = job.get_status()
        if state in {JobStatus.QUEUED, JobStatus.DEFERRED, JobStatus.SCHEDULED}:
            with contextlib.suppress(InvalidJobOperation):
                job.cancel()
            return "cancelled"
        if state is JobStatus.STARTED:
            return "cancelling"
        if state is not JobStatus.CANCELED:
            self._connection.hdel(job.key, CANCEL_FIELD)
        return _status(job)

    def resume(self, job: KnownJob, *, retry_errors: bool) -> None:
        """Enqueue a job that is over again.

        Raises `SettingsError` while it runs, and if there is nothing left to do.
        """
        registry: BaseRegistry | None = {
            JobStatus.FAILED: self.rq.failed_job_registry,
            JobStatus.STOPPED: self.rq.failed_job_registry,
            JobStatus.CANCELED: self.rq.canceled_job_registry,
            JobStatus.FINISHED: self.rq.finished_job_registry,
        }.get(job.get_status())
        if registry is None:
            raise SettingsError([f"job {job.id} is not over: it is {_status(job)}"])
        if why := _why_nothing_to_resume(job, retry_errors=retry_errors):
            raise SettingsError([f"job {job.id} {why}"])
        self._connection.hdel(job.key, CANCEL_FIELD)
        job.retries_left = job.order.retries or None
        job.meta["status"] = "validating"
        job.meta.pop("message", None)
        if retry_errors:
            job.meta["retry"] = new_id()
        registry.requeue(job)


def _options(order: JobOrder, job_id: str) -> dict[str, Any]:
    """RQ's options of a job."""
    retries = max(0, order.retries)
    return {
        "job_id": job_id,
        "kwargs": {"order": msgspec.to_builtins(order)},
        "description": f"batch {order.spec.input} -> {order.spec.output}",
        "job_timeout": order.timeout_s or -1,
        "result_ttl": KEEP_S,
        "failure_ttl": KEEP_S,
        "retry": Retry(retries, list(_PAUSES)) if retries else None,
        "meta": {
            "status": "validating",
            "request_counts": msgspec.to_builtins(RequestCounts()),
        },
        "on_success": Callback(_SUCCEEDED, CALLBACK_TIMEOUT_S) if order.on_success else None,
        "on_failure": Callback(_FAILED, CALLBACK_TIMEOUT_S) if order.on_failure else None,
    }


@contextlib.contextmanager
def batch_queue(redis_url: str, yard: str) -> Iterator[BatchQueue]:
    """The jobs of a yard, wherever its batch jobs are; errors are `translated`."""
    with connected(batch_url(redis_url)) as connection:
        yield BatchQueue(connection, yard)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A submitted job."""

    id: str
    redis_url: str
    yard: str

    def status(self) -> dict[str, Any]:
        """The batch object of the OpenAI API; raises `UnknownJob`."""
        with batch_queue(self.redis_url, self.yard) as queue:
            return describe(queue.find(self.id))

    def wait(self, timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> dict[str, Any]:
        """`status`, once the job is over; raises `WaitTimeout`."""
        give_up = clock.monotonic() + timeout_s
        with batch_queue(self.redis_url, self.yard) as queue:
            while (batch := describe(job := queue.find(self.id)))["status"] not in ENDED:
                if clock.monotonic() >= give_up:
                    why = queue.waits_for(job)
                    tail = f"; it waits for {why}" if why else ""
                    raise WaitTimeout(f"job {self.id} is not over after {timeout_s:g} s{tail}")
                clock.sleep(_LOOK_EVERY_S)
        return batch

    @property
    def has_worker(self) -> bool:
        """Whether a batch worker is there; without one the job waits."""
        with batch_queue(self.redis_url, self.yard) as queue:
            return queue.has_worker

    def cancel(self) -> str:
        """Cancel it; its new status: ``cancelling`` or ``cancelled``, or how it ended before."""
        with batch_queue(self.redis_url, self.yard) as queue:
            return queue.cancel(queue.find(self.id))

    def resume(self, *, retry_errors: bool = False) -> None:
        """Enqueue it again, for the lines that have no answer yet."""
        with batch_queue(self.redis_url, self.yard) as queue:
            queue.resume(queue.find(self.id), retry_errors=retry_errors)


def submit_batch(
    input: str | os.PathLike[str],  # noqa: A002 - the file's role, as on the command line
    output: str | os.PathLike[str],
    *,
    redis_url: str,
    yard: str = "main",
    overwrite: bool = False,
    retries: int = DEFAULT_RETRIES,
    timeout_s: int = 0,
    after: Sequence[str] = (),
    at: datetime.datetime | None = None,
    cron: str = "",
    on_success: str = "",
    on_failure: str = "",
    **options: Unpack[BatchOptions],
) -> BatchJob:
    """Submit a file of requests to RQ; a `tokenyard batch worker` that sees the files runs it.

    ``retries`` counts tries without progress; ``timeout_s`` limits one try (0: no limit).
    ``after`` names jobs that must succeed before, ``at`` is a time, ``cron`` a schedule, which
    needs file names with the time, like ``out-%Y-%m-%d.jsonl``. ``on_success`` and
    ``on_failure`` are a URL or a command. Raises `SettingsError`.
    """
    spec = spec_of(input, output, options).absolute()
    order = JobOrder(
        spec=spec,
        overwrite=overwrite,
        retries=retries,
        timeout_s=timeout_s,
        on_success=on_success,
        on_failure=on_failure,
    )
    if cron:
        if at is not None or after:
            raise SettingsError(["cron: give neither a time nor a job to wait for with it"])
        at, first = first_spec(spec, cron)
        due = at.timestamp()
        order = msgspec.structs.replace(order, cron=cron, cron_spec=spec, cron_due=due, spec=first)
    with batch_queue(redis_url, yard) as queue:
        job = queue.enqueue(order, after=after, at=at)
    return BatchJob(job.id, redis_url, yard)


def is_attended(job: Job) -> bool:
    """Whether a worker runs a job, and has shown so lately."""
    heartbeat = job.last_heartbeat
    if job.get_status(refresh=False) is not JobStatus.STARTED or heartbeat is None:
        return False
    return datetime.datetime.now(datetime.UTC) - heartbeat < _SILENT


def describe(job: KnownJob) -> dict[str, Any]:
    """The batch object of a job as JSON has it; raises `UnknownJob`."""
    described: dict[str, Any] = msgspec.to_builtins(batch_of(job))
    return described


def batch_of(job: KnownJob) -> Batch:
    """The batch object of the OpenAI API, with RQ's status and retries; raises `UnknownJob`."""
    try:
        return msgspec.convert(_described(job), Batch)
    except (*MALFORMED, redis.ResponseError) as error:
        raise UnknownJob(f"job {job.id!r} cannot be read") from error


def _described(job: KnownJob) -> dict[str, Any]:
    order, status = job.order, _status(job)
    message = job.meta.get("message") or (_last_error(job) if status == "failed" else "")
    return {
        **job.meta,
        **_cancel_times(job, status),
        "id": job.id,
        "status": status,
        "rq_status": str(job.get_status(refresh=False).value),
        "errors": {"data": [{"message": message}]} if message else None,
        "input_file_id": order.spec.input,
        "output_file_id": order.spec.output,
        "error_file_id": order.spec.errors or str(order.spec.errors_path),
        "completion_window": order.spec.window_text,
        "created_at": int(job.created_at.timestamp()),
        "retries_left": job.retries_left,
        "cron": order.cron or None,
    }


def _cancel_times(job: Job, status: str) -> dict[str, int]:
    """When a job was cancelled, which is at once where no worker had it."""
    if status not in {"cancelling", "cancelled"}:
        return {}
    raw: Any = job.connection.hget(job.key, CANCEL_FIELD)
    names = ["cancelling_at", *(["cancelled_at"] if status == "cancelled" else [])]
    return {name: int(raw) for name in names if raw and not job.meta.get(name)}


def _status(job: Job) -> str:
    """The status in OpenAI's terms; RQ also knows of jobs whose process died."""
    status = str(job.meta.get("status", "validating"))
    match job.get_status(refresh=False):
        case JobStatus.FAILED | JobStatus.STOPPED:
            return status if status in ENDED - {"completed"} else "failed"
        case JobStatus.CANCELED:
            return "cancelled"
        case JobStatus.FINISHED:
            return status
    if job.connection.hexists(job.key, CANCEL_FIELD):
        return "cancelling"
    return status


def _why_nothing_to_resume(job: Job, *, retry_errors: bool) -> str:
    """Why a job that is over has no line left to run; "" where it may have some."""
    if _status(job) != "completed":
        return ""
    errors = msgspec.convert(job.meta.get("request_counts", {}), RequestCounts).failed
    if not errors:
        return "is completed: there is nothing to resume"
    if retry_errors:
        return ""
    lines = f"{counted(errors, 'line')} with an error"
    return f"is completed: there is nothing to resume but {lines}, with --retry-errors"


def _last_error(job: Job) -> str:
    result = job.latest_result()
    lines = (result.exc_string or "").strip().splitlines() if result is not None else []
    return lines[-1] if lines else "the job has failed"
