"""A `tokenyard batch worker` whose jobs need a preparation of a test.

``python -m tests.batch.prepared FUNCTION words...``: a function of this module, called before the
worker forks for a job, and the words of `tokenyard`.
"""

from __future__ import annotations

import os
import signal
import sys

from tokenyard.batch.rq import jobs, worker
from tokenyard.batch.rq.listing import list_jobs
from tokenyard.broker.connection import open_connection
from tokenyard.cli import main


def tell() -> None:
    """Say which process is prepared."""
    sys.stderr.write(f"prepared {os.getpid()}\n")


def be_stopped() -> None:
    """SIGTERM comes while the worker imports."""
    os.kill(os.getpid(), signal.SIGTERM)


def be_killed() -> None:
    """The worker is killed while it imports."""
    os.kill(os.getpid(), signal.SIGKILL)


def set_variable() -> None:
    """An import sets a variable."""
    os.environ["SET_BY_AN_IMPORT"] = "1"


def be_cancelled() -> None:
    """The job is cancelled while the worker imports."""
    url, yard = worker.WorkerContext.url, worker.WorkerContext.yard
    with open_connection(url) as connection:
        queue = jobs.BatchQueue(connection, yard)
        [job] = list_jobs(queue).jobs
        sys.stderr.write(f"{queue.cancel(queue.find(job.batch.id))}\n")


def fail() -> None:
    """Something is not installed."""
    raise ImportError("nothing of this is here")


if __name__ == "__main__":
    name = f"tests.batch.prepared.{sys.argv[1]}"
    worker._PREPARATIONS = {jobs._PERFORM: name}  # type: ignore[misc]
    main(sys.argv[2:], prog_name="tokenyard")
