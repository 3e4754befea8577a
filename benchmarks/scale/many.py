"""Measures whether several yards on one broker are as fast as one; see `benchmarks.scale`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Final

from benchmarks.measure import Throughput, measure_throughput
from benchmarks.progress import tell
from benchmarks.scale.yard import Fleet, Yards, asker, scale_yards
from tokenyard import Client
from tokenyard.process.embedded_broker import EmbeddedBroker

YARDS: Final = 8
#: Workers, and requests under way, all yards together.
WORKERS: Final = 16
WINDOW: Final = 4096


def measure(broker: EmbeddedBroker, requests: int) -> tuple[Throughput, Throughput]:
    """Put the same load on one yard and on several, with as many clients, workers and requests."""
    tell(f"{YARDS} yards and one")
    one = _run(broker, 1, requests)
    return one, _run(broker, YARDS, requests)


def _run(broker: EmbeddedBroker, count: int, requests: int) -> Throughput:
    with ExitStack() as stack:
        yards = stack.enter_context(scale_yards(broker, Fleet(WORKERS // count), count))
        clients = [stack.enter_context(_client(yards, at)) for at in range(YARDS)]
        asking = [asker(client) for client in clients]
        threads = stack.enter_context(ThreadPoolExecutor(YARDS))

        def ask(each: int) -> int:
            return sum(threads.map(lambda one: one.many(each, WINDOW // YARDS), asking))

        ask(WINDOW // YARDS)  # warm-up
        pids = {"clients": [os.getpid()], "workers": [yards.fleet], **yards.pids}
        return measure_throughput(pids, lambda: ask(requests // YARDS))


def _client(yards: Yards, at: int) -> Client:
    return Client(yards.url, yard=yards.names[at % len(yards.names)])


def figures(runs: Sequence[tuple[Throughput, Throughput]]) -> dict[str, float]:
    """Medians over the rounds; ratios are within a round."""
    found: dict[str, float] = {}
    for at, name in enumerate(("one", "many")):
        found[f"{name}_per_s"] = median(pair[at].per_s for pair in runs)
        for process in runs[0][at].cpu_s:
            found[f"{name}_us_{process}"] = median(pair[at].cpu_us(process) for pair in runs)
    found["ratio"] = median(many.per_s / one.per_s for one, many in runs)
    return found
