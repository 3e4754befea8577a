"""Shared measurement code: clocks, CPU time by process, percentiles, tables."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

Pids = Mapping[str, Iterable[int]]

#: Seconds between two batches of a flow's requests.
TICK_S: Final = 0.005


def cpu_seconds(pids: Pids) -> dict[str, float]:
    """User plus system time of running processes, by name."""
    return {
        name: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in group)
        for name, group in pids.items()
    }


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests, seconds, and CPU time by process."""

    requests: int
    seconds: float
    cpu_s: Mapping[str, float]

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    def cpu_us(self, name: str) -> float:
        """CPU time per request in µs."""
        return self.cpu_s[name] / self.requests * 1e6


def measure_throughput(pids: Pids, run: Callable[[], int]) -> Throughput:
    """Time ``run``, which returns how many requests it made."""
    before, began = cpu_seconds(pids), time.perf_counter()
    requests = run()
    seconds, after = time.perf_counter() - began, cpu_seconds(pids)
    return Throughput(requests, seconds, {name: after[name] - before[name] for name in pids})


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times of single requests in ms."""

    all_ms: Sequence[float]

    def percentile(self, percent: int) -> float:
        """The given percentile (such as 50 or 99), in ms."""
        return statistics.quantiles(self.all_ms, n=100, method="inclusive")[percent - 1]


def paced(requests: int, rate: float, ask: Callable[[int], None]) -> Latencies:
    """Send requests at a fixed rate per second, one at a time, and time each.

    A request delayed by a slow predecessor is timed from when it was due, so that a stall counts
    for every request that it delays.
    """
    times = []
    start = time.perf_counter()
    for number in range(requests):
        due = start + number / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        ask(number)
        times.append((time.perf_counter() - due) * 1000)
    return Latencies(times)


def flowing(
    requests: int,
    rate: float,
    send: Callable[[range], None],
    receive: Callable[[], Iterable[int]],
) -> Latencies:
    """Send at a fixed rate per second without waiting for answers, and time each request.

    Every `TICK_S`, all due requests are sent together. ``receive`` waits for the next answers and
    returns the numbers of their requests; it runs in its own thread. Times count from the tick at
    which a request was due.
    """
    due: list[float] = [0.0] * requests
    times: list[float] = []

    def listen() -> None:
        while len(times) < requests:
            numbers = receive()
            now = time.perf_counter()
            times.extend((now - due[number]) * 1000 for number in numbers)

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen)
        start, sent = time.perf_counter(), 0
        for tick in itertools.count(1):
            at = start + tick * TICK_S
            batch = range(sent, min(requests, int(tick * TICK_S * rate)))
            for number in batch:
                due[number] = at
            time.sleep(max(0.0, at - time.perf_counter()))
            if batch:
                send(batch)
            sent += len(batch)
            if sent == requests or listening.done():
                break
        listening.result()
    return Latencies(times)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on standard output; floats get two digits or none."""
    table = Table(title=title)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right")
    for row in rows:
        table.add_row(*(_shown(cell) for cell in row))
    Console(width=None if Console().is_terminal else 120).print(table)


def _shown(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:,.2f}"
    return str(cell)
