"""Celery: solo pools, msgpack, results in Redis; no rate limits, no events, large prefetch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import load
from celery import Celery

URL = os.environ.get("PEER_URL", "redis://127.0.0.1:6379")
app = Celery("celery_peer", broker=URL, backend=URL)
app.conf.update(
    task_serializer="msgpack",
    result_serializer="msgpack",
    accept_content=["msgpack"],
    worker_prefetch_multiplier=128,
    worker_disable_rate_limits=True,
    task_acks_late=False,
    result_expires=60,
)


@app.task(name="peers.work")
def work(prompt: bytes) -> bytes:
    """The job."""
    return load.answer(prompt)


def client(requests: int, rate: float) -> None:
    """Run the client."""

    def ask(prompts: Sequence[bytes]) -> list[bytes]:
        asked = [work.delay(prompt) for prompt in prompts]
        return [one.get(timeout=load.WAIT_S + len(prompts) / 20) for one in asked]

    load.measure(requests, rate, ask)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        options = ["--pool=solo", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        app.worker_main(["worker", "--loglevel=WARNING", "--hostname", str(os.getpid()), *options])
    else:
        client(int(sys.argv[3]), float(sys.argv[4]))
