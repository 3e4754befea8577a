"""arq: poll delay reduced from 0.5 s to 10 ms on both sides, many concurrent jobs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import load
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker

POLL_S = 0.01


async def work(_: dict[str, Any], prompt: bytes) -> bytes:
    """The job."""
    return load.answer(prompt)


def worker(url: str) -> None:
    """Run a worker."""
    asyncio.set_event_loop(asyncio.new_event_loop())
    Worker(
        [work],
        redis_settings=RedisSettings.from_dsn(url),
        max_jobs=100,
        poll_delay=POLL_S,
        keep_result=60,
    ).run()


async def client(url: str, requests: int, rate: float) -> None:
    """Run the client."""
    pool = await create_pool(RedisSettings.from_dsn(url))

    async def ask(prompts: Sequence[bytes]) -> list[bytes]:
        timeout_s = load.WAIT_S + len(prompts) / 20
        jobs = [await pool.enqueue_job("work", prompt) for prompt in prompts]
        return [await job.result(timeout=timeout_s, poll_delay=POLL_S / 10) for job in jobs if job]

    await load.measure_async(requests, rate, ask)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(sys.argv[2])
    else:
        asyncio.run(client(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
