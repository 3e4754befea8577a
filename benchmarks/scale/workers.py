"""Measures the cost of a request and of a second as workers grow; see `benchmarks.scale`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from benchmarks.measure import Throughput, cpu_seconds, measure_throughput
from benchmarks.progress import tell
from benchmarks.scale.yard import Fleet, asker, costs_us, scale_yards
from tokenyard import Client
from tokenyard.process.embedded_broker import EmbeddedBroker
from worker.host.membership import lane_limit

PLACES: Final = 16
#: Waiting requests, in addition to those on the lanes.
WAITING: Final = 2048


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements at one number of workers."""

    full: Throughput  # full lanes; each step has as many results as the worker has places
    spread: Throughput  # `WAITING` requests over all lanes, answered as they are read
    idle_s: Mapping[str, float]  # processor seconds per idle second, by process
    joined_s: float


def measure(broker: EmbeddedBroker, workers: int, requests: int, idle_s: float) -> Run:
    """Measure all loads on new yards with ``workers`` workers."""
    tell(f"workers: {workers:,}")
    full, idle, joined_s = _full(broker, workers, requests, idle_s)
    return Run(full, _spread(broker, workers, requests), idle, joined_s)


def _full(
    broker: EmbeddedBroker, workers: int, requests: int, idle_s: float
) -> tuple[Throughput, Mapping[str, float], float]:
    window = workers * lane_limit(PLACES) + WAITING
    began = time.perf_counter()
    with scale_yards(broker, Fleet(workers, PLACES, PLACES)) as yards:
        joined_s = time.perf_counter() - began
        with Client(yards.url, yard=yards.names[0]) as client:
            checked = asker(client)
            checked.many(window, window)  # warm-up
            before = cpu_seconds(yards.pids)
            time.sleep(idle_s)
            after = cpu_seconds(yards.pids)
            idle = {name: (after[name] - before[name]) / idle_s for name in before}
            most = requests + window
            throughput = measure_throughput(yards.pids, lambda: checked.many(most, window))
    return throughput, idle, joined_s


def _spread(broker: EmbeddedBroker, workers: int, requests: int) -> Throughput:
    with (
        scale_yards(broker, Fleet(workers, PLACES)) as yards,
        Client(yards.url, yard=yards.names[0]) as client,
    ):
        checked = asker(client)
        checked.many(WAITING, WAITING)
        return measure_throughput(yards.pids, lambda: checked.many(requests, WAITING))


def figures(runs: Sequence[Run]) -> dict[str, float]:
    """Medians over the rounds."""
    found: dict[str, float] = {}
    for load in ("full", "spread"):
        found[f"{load}_per_s"] = median(getattr(one, load).per_s for one in runs)
        costs = [costs_us(getattr(one, load), one.idle_s) for one in runs]
        for name in costs[0]:
            found[f"{load}_us_{name}"] = median(one[name] for one in costs)
        found[f"{load}_us"] = median(sum(one.values()) for one in costs)
    for name in runs[0].idle_s:
        found[f"idle_ms_{name}"] = median(1000 * one.idle_s[name] for one in runs)
    return found
