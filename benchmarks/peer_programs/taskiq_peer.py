"""taskiq: Redis streams as the broker, results in Redis."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import Sequence

import load
from taskiq.cli.worker.args import WorkerArgs
from taskiq.cli.worker.run import start_listen
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

URL = os.environ.get("PEER_URL", "redis://127.0.0.1:6379")
results: RedisAsyncResultBackend[str] = RedisAsyncResultBackend(URL, result_ex_time=60)
broker = RedisStreamBroker(URL, xread_count=100).with_result_backend(results)


@broker.task("peers.work")
async def work(prompt: str) -> str:
    """The job; messages are JSON, which cannot hold bytes."""
    return base64.b64encode(load.answer(base64.b64decode(prompt))).decode()


async def client(requests: int, rate: float) -> None:
    """Run the client."""
    await broker.startup()

    async def ask(prompts: Sequence[bytes]) -> list[bytes]:
        timeout_s = load.WAIT_S + len(prompts) / 20
        asked = [await work.kiq(base64.b64encode(prompt).decode()) for prompt in prompts]
        got = [await one.wait_result(check_interval=0.001, timeout=timeout_s) for one in asked]
        return [base64.b64decode(one.return_value) for one in got]

    await load.measure_async(requests, rate, ask)
    await broker.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        start_listen(WorkerArgs(broker="taskiq_peer:broker", modules=[], workers=1))
    else:
        asyncio.run(client(int(sys.argv[3]), float(sys.argv[4])))
