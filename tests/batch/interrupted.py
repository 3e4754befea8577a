"""A `tokenyard batch worker` that gets a signal at an awkward moment.

``python -m tests.batch.interrupted MOMENT words...``: a moment of `Moment`, and the words of
`tokenyard`.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import time
from typing import Any, Final

import redis.observability.recorder
from rq.job import Job
from rq.queue import Queue
from rq.scheduler import RQScheduler
from rq.worker.base import WorkerStatus

from tests.support.waiting import eventually
from tokenyard.batch.rq import worker
from tokenyard.batch.rq.taken import WorkerQueue
from tokenyard.batch.rq.worker import BatchWorker
from tokenyard.cli import main

_recorder: Final[Any] = redis.observability.recorder


class Moment(enum.StrEnum):
    """When which signal comes."""

    #: SIGTERM, after a job, while redis-py counts a command; there it ignores what is raised.
    COUNTED = "counted"
    #: SIGTERM, before the worker knows the process of its job.
    FORKED = "forked"
    #: SIGTERM for RQ's scheduler, which the worker forks and ends, before it has its own handlers.
    SCHEDULED = "scheduled"
    #: SIGSTOP, when the broker has handed it a job.
    TAKEN = "taken"


def _stop_at_next_count() -> None:
    get = _recorder.get_observability_instance

    def stop() -> Any:
        _recorder.get_observability_instance = get
        os.kill(os.getpid(), signal.SIGTERM)
        return get()

    _recorder.get_observability_instance = stop


class CountedWorker(BatchWorker):
    """`Moment.COUNTED`."""

    _was_busy = False

    def set_state(self, state: str, *arguments: Any, **options: Any) -> None:
        """As RQ does."""
        if self._was_busy and state == WorkerStatus.IDLE:
            _stop_at_next_count()
        self._was_busy = state == WorkerStatus.BUSY
        super().set_state(state, *arguments, **options)


class ForkedWorker(BatchWorker):
    """`Moment.FORKED`."""

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        """As a batch worker does."""
        fork, parent = os.fork, os.getpid()

        def stopped() -> int:
            child = fork()
            if child:
                os.kill(parent, signal.SIGTERM)
                eventually(lambda: self._stop_requested)
            return child

        os.fork = stopped
        super().fork_work_horse(job, queue)
        os.fork = fork


_work = RQScheduler.work


def slow_start(scheduler: RQScheduler) -> None:
    """`Moment.SCHEDULED`."""
    time.sleep(2.0)
    _work(scheduler)  # type: ignore[no-untyped-call]


class TakenQueue(WorkerQueue):
    """`Moment.TAKEN`."""

    @classmethod
    def lmove(cls, *arguments: Any, **options: Any) -> Any:
        """As RQ does."""
        taken = super().lmove(*arguments, **options)
        os.kill(os.getpid(), signal.SIGSTOP)
        return taken


#: What is replaced for each: of which object, the name, by what.
_CHANGES: Final[dict[Moment, list[tuple[object, str, object]]]] = {
    Moment.COUNTED: [(worker, "BatchWorker", CountedWorker)],
    Moment.FORKED: [(worker, "BatchWorker", ForkedWorker)],
    Moment.SCHEDULED: [(worker, "_LOOK_EVERY_S", 0), (RQScheduler, "work", slow_start)],
    Moment.TAKEN: [(worker, "WorkerQueue", TakenQueue)],
}

if __name__ == "__main__":
    for owner, name, value in _CHANGES[Moment(sys.argv[1])]:
        setattr(owner, name, value)
    main(sys.argv[2:], prog_name="tokenyard")
