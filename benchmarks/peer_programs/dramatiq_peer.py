"""dramatiq: two processes of eight threads, results in Redis."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Sequence

import dramatiq
import load
from dramatiq.brokers.redis import RedisBroker
from dramatiq.cli import main
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

URL = os.environ.get("PEER_URL", "redis://127.0.0.1:6379")
broker = RedisBroker(url=URL)
broker.add_middleware(Results(backend=RedisBackend(url=URL), result_ttl=60_000))
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True, max_retries=0)
def work(prompt: str) -> str:
    """The job; messages are JSON, which cannot hold bytes."""
    return base64.b64encode(load.answer(base64.b64decode(prompt))).decode()


def client(requests: int, rate: float) -> None:
    """Run the client."""

    def ask(prompts: Sequence[bytes]) -> list[bytes]:
        timeout_ms = int(1000 * (load.WAIT_S + len(prompts) / 20))
        asked = [work.send(base64.b64encode(prompt).decode()) for prompt in prompts]
        got = [one.get_result(block=True, timeout=timeout_ms) for one in asked]
        return [base64.b64decode(one) for one in got]

    load.measure(requests, rate, ask)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        sys.argv = ["dramatiq", "dramatiq_peer", "--processes", "1", "--threads", "8"]
        sys.exit(main())
    client(int(sys.argv[3]), float(sys.argv[4]))
