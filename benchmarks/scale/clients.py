"""Measures the cost of a request as the clients grow; see `benchmarks.scale`.

    python -m benchmarks.scale.clients URL YARD CLIENTS REQUESTS REPORT

runs CLIENTS `AsyncClient`s in one process, each with its own connections and reply stream, and its
share of the window under way.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from benchmarks.broker import PROMPTS, prompts
from benchmarks.child import run_child
from benchmarks.measure import Throughput, cpu_seconds
from benchmarks.progress import tell
from benchmarks.scale.yard import Fleet, answers, costs_us, scale_yards
from tokenyard import AsyncClient
from tokenyard.process.embedded_broker import EmbeddedBroker

#: Requests under way, all clients together.
WINDOW: Final = 2048
#: Clients that connect concurrently.
_AT_ONCE: Final = 64
_IDLE_S: Final = 6.0
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements at one number of clients."""

    load: Throughput
    idle_s: dict[str, float]  # processor seconds per idle second
    client_bytes: float  # resident memory per client
    broker_bytes: float  # broker's memory per client, including its connections


def measure(broker: EmbeddedBroker, clients: int, requests: int) -> Run:
    """Measure ``clients`` clients in one process, on a new yard with two workers."""
    tell(f"clients: {clients:,}")
    with scale_yards(broker, Fleet()) as yards:
        words = [yards.url, yards.names[0], str(clients), str(requests), json.dumps(yards.pids)]
        report = run_child("benchmarks.scale.clients", words, timeout_s=_TIMEOUT_S)
    return msgspec.convert(report, Run)


async def _ask(client: AsyncClient, requests: int, window: int) -> None:
    asked, right = prompts(), answers()
    items = (asked[at % PROMPTS] for at in range(requests))
    async for number, result in client.map(items, window=window, max_tokens=32):
        if result.tokens != right[number % PROMPTS]:
            sys.exit(f"request {number}: wrong answer {result}")


async def _connect(client: AsyncClient, gate: asyncio.Semaphore) -> None:
    async with gate:
        await client.start()
        await _ask(client, 1, 1)  # from now on it also listens


async def play(url: str, yard: str, clients: int, requests: int, pids: dict[str, list[int]]) -> Run:
    """Connect all clients, then let each send its share."""
    process, broker = psutil.Process(), psutil.Process(*pids["broker"])
    groups = {"clients": [os.getpid()], **pids}
    before = process.memory_info().rss, broker.memory_info().rss
    everybody = [AsyncClient(url, yard) for _ in range(clients)]
    gate = asyncio.Semaphore(_AT_ONCE)
    await asyncio.gather(*(_connect(one, gate) for one in everybody))
    after = process.memory_info().rss, broker.memory_info().rss
    idle_s = await _idle_s(groups)
    each, window = max(1, requests // clients), max(1, WINDOW // clients)
    used, began = cpu_seconds(groups), time.perf_counter()
    await asyncio.gather(*(_ask(one, each, window) for one in everybody))
    seconds, now = time.perf_counter() - began, cpu_seconds(groups)
    await asyncio.gather(*(one.close() for one in everybody))
    return Run(
        Throughput(each * clients, seconds, {name: now[name] - used[name] for name in groups}),
        idle_s,
        *((new - old) / clients for new, old in zip(after, before, strict=True)),
    )


async def _idle_s(groups: dict[str, list[int]]) -> dict[str, float]:
    """Processor seconds per second of each process while all clients only listen."""
    before = cpu_seconds(groups)
    await asyncio.sleep(_IDLE_S)
    after = cpu_seconds(groups)
    return {name: (after[name] - before[name]) / _IDLE_S for name in groups}


def figures(runs: list[Run]) -> dict[str, float]:
    """Medians over the rounds."""
    found: dict[str, float] = {"per_s": statistics.median(one.load.per_s for one in runs)}
    costs = [costs_us(one.load, one.idle_s) for one in runs]
    for name in runs[0].load.cpu_s:
        found[f"us_{name}"] = statistics.median(one[name] for one in costs)
        found[f"idle_ms_{name}"] = statistics.median(1000 * one.idle_s[name] for one in runs)
    found["kib_each"] = statistics.median(one.client_bytes for one in runs) / 1024
    found["kib_each_broker"] = statistics.median(one.broker_bytes for one in runs) / 1024
    return found


def main() -> None:
    """Write the measurements as JSON."""
    url, yard, clients, requests, told, report = sys.argv[1:]
    run = asyncio.run(play(url, yard, int(clients), int(requests), json.loads(told)))
    Path(report).write_text(json.dumps(asdict(run)), encoding="utf-8")


if __name__ == "__main__":
    main()
