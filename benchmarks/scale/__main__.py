"""What does growth cost: more workers, waiting requests, clients, prompts, tenants, yards?

`--part` runs a single part; benchmarks/README.md has the method. The coordinator and the broker,
with an append-only file, are real; workers are played (`benchmarks.scale.fleet`), so that a
thousand of them fit on one machine.

    python -m benchmarks.scale [--part workers] [--server redis] [--rounds 3] [--json] [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar, get_args

import click

from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import publish
from benchmarks.scale import backlog as scale_backlog
from benchmarks.scale import clients as scale_clients
from benchmarks.scale import many as scale_many
from benchmarks.scale import map as scale_map
from benchmarks.scale import tenants as scale_tenants
from benchmarks.scale import workers as scale_workers
from benchmarks.scale.targets import Figures, Part, has_targets, missed
from benchmarks.yard import ServerName, embedded_broker, end_in_order
from tokenyard.process.embedded_broker import EmbeddedBroker

T = TypeVar("T")
PARTS: Final[tuple[Part, ...]] = get_args(Part)


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of each part, and the server."""

    server: ServerName = "valkey"
    rounds: int = 3
    workers: Sequence[int] = (1, 2, 10, 100, 1000)
    worker_requests: int = 6_000
    idle_s: float = 2.0
    depths: Sequence[int] = (10_000, 100_000, 1_000_000)
    drained: int = 20_000
    submits: int = 200
    tenants: Sequence[int] = (0, 1, 10_000)
    tenants_waiting: int = 1_000_000
    clients: Sequence[int] = (1, 10, 100, 2000)
    client_requests: int = 8_000
    prompts: int = 1_000_000
    yard_requests: int = 16_000


QUICK: Final = Plan(
    rounds=1,
    workers=(2, 20),
    worker_requests=300,
    idle_s=0.2,
    depths=(2_000,),
    drained=5_000,
    submits=20,
    tenants=(0, 1, 100),
    tenants_waiting=2_000,
    clients=(1, 20),
    client_requests=200,
    prompts=2_000,
    yard_requests=800,
)


def measure_workers(plan: Plan) -> Figures:
    """Measure by the number of workers; the numbers take turns."""
    runs = _in_turn(
        plan,
        plan.workers,
        lambda broker, count: scale_workers.measure(
            broker, count, plan.worker_requests, plan.idle_s
        ),
    )
    return {str(count): scale_workers.figures(found) for count, found in runs.items()}


def measure_backlog(plan: Plan) -> Figures:
    """Measure by the number of waiting requests."""
    depths = scale_backlog.measure(
        plan.server, plan.depths, plan.drained, plan.submits, plan.rounds
    )
    return {str(depth.waiting): scale_backlog.figures(depth) for depth in depths}


def measure_clients(plan: Plan) -> Figures:
    """Measure by the number of clients; the numbers take turns."""
    runs = _in_turn(
        plan,
        plan.clients,
        lambda broker, count: scale_clients.measure(broker, count, plan.client_requests),
    )
    return {str(count): scale_clients.figures(found) for count, found in runs.items()}


def _in_turn(
    plan: Plan, sizes: Sequence[int], measure: Callable[[EmbeddedBroker, int], T]
) -> dict[int, list[T]]:
    runs: dict[int, list[T]] = {size: [] for size in sizes}
    for _ in range(plan.rounds):
        for size, found in runs.items():
            with embedded_broker(plan.server) as broker:
                found.append(measure(broker, size))
    return runs


def measure_map(plan: Plan) -> Figures:
    """Resident memory in MiB by process at each look, and its growth between looks."""
    with embedded_broker(plan.server) as broker:
        looks = scale_map.measure(broker, plan.prompts)
    found = {
        f"{percent}": {name: size / 2**20 for name, size in look.items()}
        for percent, look in zip(scale_map.LOOKS, looks, strict=True)
    }
    return {**found, "grown": scale_map.grown(looks)}


def measure_tenants(plan: Plan) -> Figures:
    """Measure by the number of tenants that have the same requests waiting; 0: nobody has one."""
    sides = scale_tenants.measure(
        plan.server, plan.tenants, plan.tenants_waiting, plan.drained, plan.rounds
    )
    return {str(side.tenants): scale_tenants.figures(side) for side in sides}


def measure_yards(plan: Plan) -> Figures:
    """Measure one yard and several, in turn."""
    with embedded_broker(plan.server) as broker:
        runs = [scale_many.measure(broker, plan.yard_requests) for _ in range(plan.rounds)]
    return {str(scale_many.YARDS): scale_many.figures(runs)}


_MEASURES: Final[Mapping[Part, Callable[[Plan], Figures]]] = {
    "workers": measure_workers,
    "backlog": measure_backlog,
    "clients": measure_clients,
    "map": measure_map,
    "tenants": measure_tenants,
    "yards": measure_yards,
}
_TITLES: Final[Mapping[Part, str]] = {
    "workers": "by workers; us: CPU µs per request, idle: CPU ms per second",
    "backlog": "by waiting requests, beside an empty yard in turn",
    "clients": "by clients; us: CPU µs per request",
    "map": "resident MiB at so many percent of a map",
    "tenants": "by tenants of the waiting requests; us: CPU µs per request",
    "yards": "several yards and one, the same load",
}


def show(part: Part, figures: Figures) -> None:
    """Print one table: figures down, sizes across."""
    names = list(dict.fromkeys(name for one in figures.values() for name in one))
    rows = [(name, *(one.get(name, "") for one in figures.values())) for name in names]
    print_table(f"{part}: {_TITLES[part]}", ["", *figures], rows)


@click.command(context_settings={"show_default": True})
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Default: all.")
@click.option("--server", type=click.Choice(["valkey", "redis"]), default="valkey")
@click.option("--rounds", default=3, type=click.IntRange(1), help="Medians are shown.")
@click.option(
    "--waiting",
    default=Plan().tenants_waiting,
    type=click.IntRange(1),
    help="Requests that wait in each yard of the part tenants.",
)
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    parts: tuple[Part, ...],
    server: ServerName,
    rounds: int,
    waiting: int,
    *,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure what grows with a yard; the status is not 0 where a target is missed."""
    end_in_order()
    full = Plan(rounds=rounds, tenants_waiting=waiting)
    plan = replace(QUICK if quick else full, server=server)
    found = {part: _MEASURES[part](plan) for part in parts or PARTS}
    told = [] if quick else [line for part in found for line in missed(part, found[part])]

    def show_all() -> None:
        for part, one in found.items():
            show(part, one)
        is_judged = not quick and any(map(has_targets, found))
        print(
            *(told or ["every target holds" if is_judged else "no target was looked at"]), sep="\n"
        )
        print(machine())

    figures = {str(part): one for part, one in found.items()}
    publish({**figures, "missed": told}, show_all, as_json=as_json)
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
