"""The batch jobs of a yard by their state, page by page, and parsed.

What RQ stores can be written by everybody who reaches the server; a job that is no batch job is
listed by its name, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from tokenyard.batch.rq.jobs import (
    PERFORM_FOR_GATEWAYS,
    BatchQueue,
    ForeignJob,
    JobOrder,
    KnownJob,
    UnknownJob,
    batch_of,
    is_attended,
)
from tokenyard.batch.state import Batch

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
    foreign: Mapping[str, str]  # names of jobs that are no batch jobs; each text follows its name


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
    queue: BatchQueue, places: Iterable[Place] = PLACES, *, start: int = 0, most: int = 0
) -> JobPage:
    """Up to ``most`` jobs of each place (0: all), in the order of the places."""
    names: list[str] = []
    for place in places:
        names += _names(queue, place, start, most)
    names = list(dict.fromkeys(names))
    pipeline: Any = queue.rq.connection.pipeline(transaction=False)
    for name in names:
        pipeline.hgetall(KnownJob.key_for(name))
    jobs, foreign = [], {}
    for name, raw in zip(names, pipeline.execute(raise_on_error=False), strict=True):
        try:
            if raw:  # else RQ has forgotten it
                job = KnownJob(name, connection=queue.rq.connection)
                job.restore(raw)
                jobs.append(_listed(job))
        except ForeignJob as error:
            foreign[name] = str(error)
        except (ValueError, TypeError, UnknownJob):
            foreign[name] = "cannot be read"
    return JobPage(jobs, foreign)


def find_listed(queue: BatchQueue, name: str) -> ListedJob:
    """One job; raises `UnknownJob`."""
    return _listed(queue.find(name))


def _listed(job: KnownJob) -> ListedJob:
    return ListedJob(
        batch=batch_of(job),
        order=job.order,
        is_of_gateway=job.func_name == PERFORM_FOR_GATEWAYS,
        is_attended=is_attended(job),
        worker=str(job.worker_name or ""),
    )


def _names(queue: BatchQueue, place: Place, start: int, most: int) -> list[str]:
    last = start + most - 1 if most else -1
    run: Any = queue.rq.connection
    if place == "waiting":
        return [raw.decode(errors="replace") for raw in run.lrange(queue.rq.key, start, last)]
    registry, is_last_first = _registry(queue, place), _REGISTRIES[place][1]
    found = run.zrange(registry.key, start, last, desc=is_last_first)
    texts = (raw.decode(errors="replace") for raw in found)
    return [text.partition(":")[0] if place == "running" else text for text in texts]


def _registry(queue: BatchQueue, place: Place) -> Any:
    return getattr(queue.rq, _REGISTRIES[place][0])
