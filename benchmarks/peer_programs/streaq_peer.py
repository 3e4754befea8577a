"""streaQ: Redis streams, jobs enqueued in bulk.

Its `result()` subscribes to one channel per job in sequence, which gave 10 to 220 jobs a second.
Reading the results' keys in bulk is at least four times faster, so this program does that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import anyio
import load
from streaq import Worker

URL = os.environ.get("PEER_URL", "redis://127.0.0.1:6379")
BATCH = 1000
worker: Worker[None] = Worker(redis_url=URL, concurrency=32, prefetch=100)


@worker.task(ttl=60)
async def work(prompt: bytes) -> bytes:
    """The job."""
    return load.answer(prompt)


async def client(requests: int, rate: float) -> None:
    """Run the client."""
    async with worker:

        async def ask(prompts: Sequence[bytes]) -> list[bytes]:
            asked = [work.enqueue(prompt) for prompt in prompts]
            await worker.enqueue_many(asked)
            found: dict[str, bytes] = {}
            with anyio.fail_after(load.WAIT_S + len(prompts) / 20):
                while len(found) < len(asked):
                    ids = [one.id for one in asked if one.id not in found][:BATCH]
                    packed = await worker.redis.mget([worker.results_key + name for name in ids])
                    for name, one in zip(ids, packed, strict=True):
                        if one is not None:
                            found[name] = (await worker.deserialize(one))["r"]
                    await anyio.sleep(0.001)
            return [found[one.id] for one in asked]

        await load.measure_async(requests, rate, ask)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker.run_sync()
    else:
        anyio.run(client, int(sys.argv[3]), float(sys.argv[4]))
