"""What does the gateway cost, compared with vLLM's own server before the same engine?

A yard with one worker behind one gateway, `vllm serve`, and where the program `vllm-rs` is on the
PATH that, with its own engine and before a yard: the same model, threads and KV cache.
vLLM's own client (`vllm bench serve`) asks both for streams of completions, all at once, then at
half of that rate. Then two gateways before two workers, and many open streams on one gateway.
Every answer is checked.

    python -m benchmarks.gateway [--rounds 3] [--json] [--quick]
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final

import click

from benchmarks.cold_start.serve import has_rust
from benchmarks.gateway.client import Clients, clients
from benchmarks.gateway.figures import FLEET, Load, Round, show, summary
from benchmarks.gateway.sides import Side, bridge_side, serve_side, yard_side
from benchmarks.gateway.streams import hold_open
from benchmarks.llama import models_folder
from benchmarks.measure import cpu_seconds
from benchmarks.progress import publish, tell
from benchmarks.serving.case import LEAST_PACED, Task, Workload
from benchmarks.serving.stage import WORKERS, arithmetic_workload, counting_workload, share_cores
from benchmarks.yard import end_in_order

_WARM_UP: Final = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a measurement."""

    rounds: int
    short_requests: int  # 0: none
    long_requests: int
    paced_s: float  # per side and round
    streams: int
    #: Start all sides at once, which spoils the times of their starts, and none with vllm-rs.
    together: bool = False

    @classmethod
    def of(cls, rounds: int, *, quick: bool) -> Plan:
        """The whole plan, or a small one for CI with one model, since starting takes longest."""
        if quick:
            return cls(1, 0, 16, 1.0, 64, together=True)
        return cls(rounds, 1024, 256, 20.0, 2000)


@dataclass(frozen=True, slots=True)
class Bench:
    """A workload, its tasks, and who asks."""

    clients: Clients
    workload: Workload
    tasks: Sequence[Task]

    def put(self, side: Side, requests: int, rate: float | None = None) -> Load:
        """Put a load on a side; one client process for each of its addresses."""
        tasks = list(itertools.islice(itertools.cycle(self.tasks), requests))
        before = cpu_seconds(side.pids)
        asked = [
            self.clients.put(url, self.workload, tasks[at :: len(side.urls)], rate)
            for at, url in enumerate(side.urls)
        ]
        told = [one.result() for one in asked]
        after = cpu_seconds(side.pids)
        return Load(told, {name: after[name] - before[name] for name in side.pids})

    def rounds(self, sides: Mapping[str, Side], requests: int, rounds: int) -> list[Round]:
        """All requests at once, to one side after another; forth and back."""
        for side in sides.values():
            self.put(side, min(requests, _WARM_UP))
        return [self._round(sides, number, requests) for number in range(rounds)]

    def paced(
        self, sides: Mapping[str, Side], rate: float, seconds: float, rounds: int
    ) -> list[Round]:
        """Requests at random moments, which are the same for all sides."""
        requests = max(LEAST_PACED, round(rate * seconds))
        return [self._round(sides, number, requests, rate) for number in range(rounds)]

    def _round(
        self, sides: Mapping[str, Side], number: int, requests: int, rate: float | None = None
    ) -> Round:
        names = list(sides) if number % 2 == 0 else list(sides)[::-1]
        found = {name: self.put(sides[name], requests, rate) for name in names}
        for name in names:
            shown = "at once" if rate is None else f"at {rate:.1f} requests/s"
            tell(f"{self.workload.name}, {shown}, {name}: {found[name].requests_per_s:.1f}")
        return found


def measure(plan: Plan) -> dict[str, Any]:
    """Measure both workloads in sequence."""
    with clients(WORKERS) as asking, models_folder() as models:
        long = Bench(asking, *counting_workload(models, plan.long_requests))
        short = Bench(asking, *arithmetic_workload())
        figures = _measure_long(long, plan)
        return figures | (_measure_short(short, plan) if plan.short_requests else {})


Starting = dict[str, AbstractContextManager[Side]]


def _start(stack: ExitStack, sides: Starting, *, together: bool) -> dict[str, Side]:
    """Start sides, one after another or all at once; they end with the stack."""
    if not together:
        return {name: stack.enter_context(side) for name, side in sides.items()}
    # Children end with the thread that has started them: it must outlive them.
    pool = stack.enter_context(ThreadPoolExecutor(len(sides)))
    begun = {name: pool.submit(stack.enter_context, side) for name, side in sides.items()}
    return {name: one.result() for name, one in begun.items()}


def _sides(bench: Bench, plan: Plan) -> Starting:
    sides: Starting = {"gateway": yard_side(bench.workload, 1), "serve": serve_side(bench.workload)}
    if plan.together or not has_rust():
        return sides
    rust = serve_side(bench.workload, "vllm-rs")
    return {**sides, "rust": rust, "bridge": bridge_side(bench.workload)}


def _measure_short(bench: Bench, plan: Plan) -> dict[str, Any]:
    with ExitStack() as stack:
        sides = _start(stack, _sides(bench, plan), together=plan.together)
        return summary(bench.rounds(sides, plan.short_requests, plan.rounds), "arithmetic_")


def _measure_long(bench: Bench, plan: Plan) -> dict[str, Any]:
    with ExitStack() as stack:
        fleets: Starting = {FLEET: yard_side(bench.workload, WORKERS)}
        early, late = (fleets, {}) if plan.together else ({}, fleets)
        sides = _start(stack, _sides(bench, plan) | early, together=plan.together)
        fleet, door = sides.pop(FLEET, None), sides["gateway"]
        bench.clients.wait_until_ready()
        full = bench.rounds(sides, plan.long_requests, plan.rounds)
        rate = (
            min(statistics.median(one[name].requests_per_s for one in full) for name in sides) / 2
        )
        paced = bench.paced(sides, rate, plan.paced_s, plan.rounds)
        tasks = list(itertools.islice(itertools.cycle(bench.tasks), plan.streams))
        held = hold_open(door.urls[0], bench.workload, tasks)
        figures = {
            **summary(full, paced=paced),
            "offered_per_s": rate,
            **{f"{name}_start_s": side.start_s for name, side in sides.items()},
            **{f"{name}_rss_mib": side.door_mib for name, side in sides.items()},
            "open_streams": held.streams,
            "open_streams_peak": held.peak,
            "open_streams_s": held.seconds,
        }
        fleet = fleet or _start(stack, late, together=False)[FLEET]
        both = {"gateway": door, FLEET: fleet}
        return figures | _of_two(bench.rounds(both, plan.long_requests, plan.rounds))


def _of_two(rounds: Sequence[Round]) -> dict[str, float]:
    return {
        "fleet_requests_per_s": statistics.median(one[FLEET].requests_per_s for one in rounds),
        "ratio_of_two": statistics.median(
            one[FLEET].requests_per_s / one["gateway"].requests_per_s for one in rounds
        ),
    }


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=3, type=click.IntRange(1), help="Medians are shown.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(rounds: int, *, quick: bool, as_json: bool) -> None:
    """Compare a gateway before a worker with vLLM's own server before its own engine."""
    end_in_order()
    threads = share_cores()
    plan = Plan.of(rounds, quick=quick)
    found = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in measure(plan).items()
    }

    publish(found, lambda: show(found, plan.rounds, threads), as_json=as_json)


if __name__ == "__main__":
    main()
