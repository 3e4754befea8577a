"""How much of vLLM's speed remains behind Tokenyard? Tokens/s, and the time to each token.

One real engine is used through all of Tokenyard, called directly in three ways, and behind `vllm
serve`, with whole answers and with streams. The workloads are sums with known answers, and 512
tokens in, 128 out on a Llama of random weights. Then all sides stream at the same offered load.
Every answer is checked.

    python -m benchmarks.serving [--shape 1b] [--rounds 3] [--json] [--quick]

With a shape, the Llama has a real size, and the sides run in sequence, as the GPU has room.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from benchmarks.device import on_gpu
from benchmarks.llama import SHAPES
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import exit_if_failed, limit_option, publish, save
from benchmarks.serving import figures as serving_figures
from benchmarks.serving.case import Load, Outcome
from benchmarks.serving.figures import UNITS, BySide, cell, prefix, speeds, time_rows, times
from benchmarks.serving.shape import measure as measure_shape
from benchmarks.serving.shape import plan_for as plan_for_shape
from benchmarks.serving.sides import EVERYBODY, STREAMED, Engine
from benchmarks.serving.stage import WORKERS, Stage, arithmetic_stage, long_stage, share_cores
from benchmarks.yard import end_in_order

Round = Mapping[str, Outcome]

#: The sides with their names in the table.
SIDES: Final = {**serving_figures.SIDES, "workers": f"Tokenyard, {WORKERS} workers"}
#: Ratio -> numerator (Tokenyard's side), denominator and target.
RATIOS: Final = {**serving_figures.RATIOS, "ratio_of_workers": ("workers", "tokenyard", None)}
#: Offered load, relative to what the slowest side can stream.
_OFFERED: Final = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a measurement."""

    rounds: int
    short_requests: int
    long_requests: int
    paced_s: float  # per side and round
    workers: int  # of one more yard; 1: none
    short_engines: Sequence[Engine]
    long_engines: Sequence[Engine]


@dataclass(frozen=True, slots=True)
class Report:
    """All rounds of a workload."""

    full: Sequence[Round]
    offered_per_s: float = 0.0
    paced: Sequence[Round] = ()


def plan_for(rounds: int, *, quick: bool) -> Plan:
    """The plan; ``quick`` has the fewest engines that cover all code, as their start dominates."""
    if quick:
        return Plan(1, 256, 16, 2.0, 1, ("tokenyard",), ("tokenyard", "program"))
    return Plan(rounds, 4096, 256, 20.0, WORKERS, EVERYBODY, EVERYBODY)


def measure_full(stage: Stage, requests: int, rounds: int) -> list[Round]:
    """Submit all requests together, to one side after another."""
    sides = [side for side in SIDES if side in stage.sides]
    for side in sides:
        stage.put(side, stage.load(min(requests, 128), streams=side in STREAMED))  # warms up
    return [
        {side: stage.put(side, stage.load(requests, streams=side in STREAMED)) for side in sides}
        for _ in range(rounds)
    ]


def measure_paced(stage: Stage, seconds: float, rounds: int, rate: float) -> list[Round]:
    """Start streams at random times."""
    load = Load.paced(stage.tasks, rate, seconds)
    return [
        {side: stage.put(side, load) for side in STREAMED if side in stage.sides}
        for _ in range(rounds)
    ]


def measure_long(stage: Stage, plan: Plan) -> Report:
    """Measure at full load, then at half of what the slowest side can stream."""
    full = measure_full(stage, plan.long_requests, plan.rounds)
    streamed = [side for side in STREAMED if side in stage.sides]
    speeds = [[one[side].requests_per_s for one in full] for side in streamed]
    rate = _OFFERED * min(map(statistics.median, speeds))
    return Report(full, rate, measure_paced(stage, plan.paced_s, plan.rounds, rate))


def measure(plan: Plan) -> dict[str, Report]:
    """Measure both workloads in sequence."""
    with arithmetic_stage(plan.short_engines, plan.workers) as stage:
        short = Report(measure_full(stage, plan.short_requests, plan.rounds))
    with long_stage(plan.long_engines, plan.workers, plan.long_requests) as stage:
        return {"": measure_long(stage, plan), "arithmetic_": short}


def summary(reports: Mapping[str, Report]) -> dict[str, float]:
    """Medians over the rounds; figures without a prefix are of the long workload."""
    figures: dict[str, float] = {}
    for workload, report in reports.items():
        full, paced = _by_side(report.full), _by_side(report.paced)
        named = {**speeds(full), **_ratios(report.full), **times(paced)}
        figures |= {workload + name: round(value, 3) for name, value in named.items()}
        if report.offered_per_s:
            figures[f"{workload}offered_per_s"] = round(report.offered_per_s, 3)
    return figures


def _by_side(rounds: Sequence[Round]) -> BySide:
    return {side: [one[side] for one in rounds] for side in (rounds[0] if rounds else ())}


def _ratios(rounds: Sequence[Round]) -> dict[str, float]:
    """Ratios within each round, so that a temporarily busy machine favours no side."""
    return {
        name: statistics.median(one[theirs].seconds / one[ours].seconds for one in rounds)
        for name, (ours, theirs, _) in RATIOS.items()
        if ours in rounds[0] and theirs in rounds[0]
    }


def show(figures: Mapping[str, Any], plan: Plan, threads: int) -> None:
    """Print the figures as tables."""
    for workload, title, requests in (
        ("arithmetic_", "sums", plan.short_requests),
        ("", "512/128", plan.long_requests),
    ):
        print_table(
            f"{title}: {requests:,} requests at once; medians of {plan.rounds}",
            ("", "requests/s", "tokens/s", "CPU µs/token"),
            _speed_rows(figures, workload),
        )
    print_table("ratios of neighbouring rounds", ("", "sums", "512/128"), _ratio_rows(figures))
    print_table(
        f"512/128, streams, {figures['offered_per_s']:.1f} requests/s begin; ms",
        ("", "TTFT p50", "p99", "token to token p50", "p99"),
        time_rows(figures),
    )
    print(f"{machine()}; threads of each engine: {threads}")


def _speed_rows(figures: Mapping[str, Any], workload: str) -> list[tuple[object, ...]]:
    return [
        (title, *(cell(figures.get(f"{workload}{prefix(side)}{unit}")) for unit in UNITS))
        for side, title in SIDES.items()
    ]


def _ratio_rows(figures: Mapping[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            f"{SIDES[ours]} / {SIDES[theirs]}",
            cell(figures.get(f"arithmetic_{name}")),
            cell(figures.get(name)),
        )
        for name, (ours, theirs, _) in RATIOS.items()
    ]


def run_shape(name: str, rounds: int, limit_s: float, *, quick: bool, as_json: bool) -> None:
    """Measure a Llama of a real size; exits with failure if a side fails."""
    plan = plan_for_shape(name, rounds, limit_s, quick=quick)
    found = measure_shape(plan, lambda so_far: save(serving_figures.summary(so_far, plan)))
    figures = serving_figures.summary(found, plan)
    publish(figures, lambda: serving_figures.show(figures), as_json=as_json)
    exit_if_failed(found.failed)


@click.command(context_settings={"show_default": True})
@click.option(
    "--shape",
    type=click.Choice(["tiny", *SHAPES]),
    help="Size of the model; with 1b and 8b the sides run one after the other."
    "  [default: tiny on a CPU, 1b on a GPU]",
)
@click.option("--rounds", default=3, type=click.IntRange(1), help="Medians are shown.")
@limit_option("With 1b and 8b: no round begins that would end later; one of each side does.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(shape: str | None, rounds: int, limit_s: float, *, quick: bool, as_json: bool) -> None:
    """Compare real vLLM behind Tokenyard with the same engine called directly, and by HTTP."""
    end_in_order()
    shape = shape or ("1b" if on_gpu() else "tiny")
    threads = 0 if on_gpu() else share_cores()
    if shape != "tiny":
        run_shape(shape, rounds, limit_s, quick=quick, as_json=as_json)
        return
    if on_gpu():
        raise click.UsageError("all sides at once have no room on a GPU; use --shape 1b or 8b")
    plan = plan_for(rounds, quick=quick)
    figures = summary(measure(plan))
    publish(figures, lambda: show(figures, plan, threads), as_json=as_json)


if __name__ == "__main__":
    main()
