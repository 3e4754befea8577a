"""Measures what tenants cost, to a request and in memory; see `benchmarks.scale`.

The same number of requests waits in each of several yards, on a broker each: without a tenant, of
one tenant, and of many, who have equally many.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from benchmarks.measure import Throughput
from benchmarks.progress import tell
from benchmarks.scale.backlog import Side
from benchmarks.scale.yard import Fleet, scale_yards
from benchmarks.yard import ServerName, embedded_broker


@dataclass(slots=True)
class Tenants:
    """The measurements with one number of tenants."""

    tenants: int
    bytes_each: float  # of a waiting request, beyond its payload
    drains: list[Throughput] = field(default_factory=list)


def measure(
    server: ServerName, counts: Sequence[int], waiting: int, requests: int, rounds: int
) -> list[Tenants]:
    """Fill a yard for each number of tenants, then answer some of each in turn."""
    with ExitStack() as stack:
        sides: list[tuple[Side, Tenants]] = []
        for count in counts:
            broker = stack.enter_context(embedded_broker(server))
            side = Side(stack.enter_context(scale_yards(broker, Fleet())), count)
            tell(f"tenants: {count:,}")
            before = side.memory()
            side.fill(waiting)
            bytes_each = (side.memory() - before) / waiting - side.payload_bytes
            _drain(side, waiting, requests)  # just after a fill requests cost more
            sides.append((side, Tenants(count, bytes_each)))
        for number in range(rounds):
            for side, found in sides if number % 2 else reversed(sides):
                found.drains.append(_drain(side, waiting, requests))
        if not all(side.check() for side, _ in sides):
            sys.exit("no answer was found")
    return [found for _, found in sides]


def _drain(side: Side, waiting: int, requests: int) -> Throughput:
    side.fill(waiting + requests)
    return side.drain(requests)


def figures(found: Tenants) -> dict[str, float]:
    """Medians over the rounds."""
    return {
        "dispatched_per_s": median(one.per_s for one in found.drains),
        "us_coordinator": median(one.cpu_us("coordinator") for one in found.drains),
        "us_broker": median(one.cpu_us("broker") for one in found.drains),
        "bytes_beyond_payload": found.bytes_each,
    }
