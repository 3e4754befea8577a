"""RQ: SimpleWorker, which does not fork per job; jobs enqueued in bulk, results polled."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import load
import redis
from rq import Queue, SimpleWorker
from rq.job import Job

QUEUE = "peers"
BATCH = 1000


def work(prompt: bytes) -> bytes:
    """The job."""
    return load.answer(prompt)


def worker(url: str) -> None:
    """Run a worker."""
    SimpleWorker([QUEUE], connection=redis.Redis.from_url(url)).work(logging_level="WARNING")


def client(url: str, requests: int, rate: float) -> None:
    """Run the client."""
    connection = redis.Redis.from_url(url)
    queue = Queue(QUEUE, connection=connection)

    def ask(prompts: Sequence[bytes]) -> list[bytes]:
        made = [
            queue.prepare_data("rq_peer.work", args=(prompt,), result_ttl=60) for prompt in prompts
        ]
        ids = [job.id for job in queue.enqueue_many(made)]
        found: dict[str, bytes] = {}
        until = time.monotonic() + load.WAIT_S + len(prompts) / 20
        while len(found) < len(ids):
            if time.monotonic() > until:
                raise SystemExit(f"{len(ids) - len(found)} jobs have no result")
            waiting = [name for name in ids if name not in found][:BATCH]
            for job in Job.fetch_many(waiting, connection):
                if job is not None and job.is_finished:
                    found[job.id] = job.return_value()
            time.sleep(0.001)
        return [found[name] for name in ids]

    load.measure(requests, rate, ask)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(sys.argv[2])
    else:
        client(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
