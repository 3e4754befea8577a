"""The batch jobs of a yard by their state, page by page, and parsed.

What RQ stores can be written by everybody who reaches the server; a job that cannot be read is
listed by its name only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
import redis
from msgspec import Meta, Struct
from rq.job import Job
from rq.serializers import JSONSerializer

from tokenyard.batch.rq.jobs import (
    FUNCTIONS,
    MALFORMED,
    PERFORM_FOR_GATEWAYS,
    BatchQueue,
    JobOrder,
    UnknownJob,
    describe,
    is_attended,
    order_of,
)
from tokenyard.batch.state import ENDED

#: Where a job is at RQ: it runs, waits for a worker, for its time or for another job, or is over.
Place = Literal[
    "running", "waiting", "scheduled", "deferred", "completed", "ended early", "never begun"
]
PLACES: Final[tuple[Place, ...]] = get_args(Place)
#: RQ's registry of each place, and whether its last job comes first; ``waiting`` is its queue.
_REGISTRIES: Final[Mapping[Place, tuple[str, bool]]] = {
    "running": ("started_job_registry", True),
    "scheduled": ("scheduled_job_registry", False),
    "deferred": ("deferred_job_registry", False),
    "completed": ("finished_job_registry", True),
    "ended early": ("failed_job_registry", True),
    "never begun": ("canceled_job_registry", True),
}

_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, Meta(ge=0, le=2.0**40)]


class Counts(Struct, frozen=True):
    """Lines of a job's input, and how many have a result or an error."""

    total: _Count = 0
    completed: _Count = 0
    failed: _Count = 0

    @property
    def done(self) -> int:
        """Lines that have either."""
        return self.completed + self.failed


class _Message(Struct, frozen=True):
    message: str


class _Messages(Struct, frozen=True):
    data: list[_Message]


class Batch(Struct, frozen=True, kw_only=True):
    """The batch object of a job, as `describe` gives it; times are unix seconds."""

    id: str
    status: str
    rq_status: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    created_at: _Seconds
    request_counts: Counts | None = None
    errors: _Messages | None = None
    completion_window: str | None = None
    in_progress_at: _Seconds | None = None
    finalizing_at: _Seconds | None = None
    completed_at: _Seconds | None = None
    failed_at: _Seconds | None = None
    expired_at: _Seconds | None = None
    cancelled_at: _Seconds | None = None
    lines_per_s: _Seconds | None = None
    eta_s: _Seconds | None = None
    retries_left: int | None = None
    cron: str | None = None

    @property
    def counts(self) -> Counts:
        """Its lines; zeros while they are not known."""
        return self.request_counts or Counts()

    @property
    def message(self) -> str:
        """Why it failed."""
        return self.errors.data[0].message if self.errors and self.errors.data else ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended until it is resumed."""
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class ListedJob:
    """One job."""

    batch: Batch
    order: JobOrder
    is_of_gateway: bool  # else of the command line or a script
    is_attended: bool  # a worker runs it, and has shown so lately
    worker: str  # of RQ, its present or last one

    @property
    def tenant(self) -> str:
        """Whose batch it is; "" for one of an operator."""
        return self.order.spec.tenant


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs of some places."""

    jobs: Sequence[ListedJob]
    unreadable: Sequence[str]  # names


def count_jobs(queue: BatchQueue) -> dict[Place, int]:
    """How many jobs are at each place, with those of others that use the queue."""
    pipeline: Any = queue.rq.connection.pipeline(transaction=False)
    for place in PLACES:
        if place == "waiting":
            pipeline.llen(queue.rq.key)
        else:
            pipeline.zcard(_registry(queue, place).key)
    return dict(zip(PLACES, pipeline.execute(), strict=True))


def list_jobs(
    queue: BatchQueue, places: Iterable[Place] = PLACES, *, start: int = 0, most: int = 50
) -> JobPage:
    """Up to ``most`` jobs of each place, in the order of the places."""
    names: list[str] = []
    for place in places:
        names += _names(queue, place, start, most)
    return read_jobs(queue, list(dict.fromkeys(names)))


def read_jobs(queue: BatchQueue, names: Sequence[str]) -> JobPage:
    """The jobs of these names that RQ still has."""
    pipeline: Any = queue.rq.connection.pipeline(transaction=False)
    for name in names:
        pipeline.hgetall(Job.key_for(name))
    jobs, unreadable = [], []
    for name, raw in zip(names, pipeline.execute(raise_on_error=False), strict=True):
        try:
            if raw:
                job = Job(name, connection=queue.rq.connection, serializer=JSONSerializer)
                job.restore(raw)
                if job.func_name in FUNCTIONS:
                    jobs.append(_listed(job))
        except (*MALFORMED, redis.ResponseError):
            unreadable.append(name)
    return JobPage(jobs, unreadable)


def find_listed(queue: BatchQueue, name: str) -> ListedJob:
    """One job; raises `UnknownJob`."""
    job = queue.find(name)
    try:
        return _listed(job)
    except (*MALFORMED, redis.ResponseError) as error:
        raise UnknownJob(f"job {name!r} cannot be read") from error


def _listed(job: Job) -> ListedJob:
    return ListedJob(
        batch=msgspec.convert(describe(job), Batch),
        order=order_of(job),
        is_of_gateway=job.func_name == PERFORM_FOR_GATEWAYS,
        is_attended=is_attended(job),
        worker=str(job.worker_name or ""),
    )


def _names(queue: BatchQueue, place: Place, start: int, most: int) -> list[str]:
    last = start + most - 1
    run: Any = queue.rq.connection
    if place == "waiting":
        return [raw.decode(errors="replace") for raw in run.lrange(queue.rq.key, start, last)]
    registry, is_last_first = _registry(queue, place), _REGISTRIES[place][1]
    found = run.zrange(registry.key, start, last, desc=is_last_first)
    texts = (raw.decode(errors="replace") for raw in found)
    return [text.partition(":")[0] if place == "running" else text for text in texts]


def _registry(queue: BatchQueue, place: Place) -> Any:
    return getattr(queue.rq, _REGISTRIES[place][0])
