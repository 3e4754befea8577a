"""How long is it to the first token? From nothing, on a warm process, and through a whole yard.

The same arithmetic model with the same settings (`benchmarks/models.toml`): `vllm serve` from
nothing, a cold `vllm.LLM`, a load by a warm process, a swap of two models, waking from sleep, and
a request for a model that no worker holds. Every answer is checked.

    python -m benchmarks.cold_start [--rounds 5] [--json] [--quick]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import click

from benchmarks.cold_case import Timed, tasks
from benchmarks.cold_llm import measure_llm
from benchmarks.cold_request import measure_request
from benchmarks.cold_serve import measure_serve
from benchmarks.cold_warm import measure_warm
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.yard import end_in_order

Round = Mapping[str, Timed]

#: What is timed, and how the table calls it.
PARTS: Final = {
    "serve_cold": "vllm serve",
    "llm_cold": "vllm.LLM",
    "paid_before": "warming up",
    "warm_create": "create",
    "swap": "swap",
    "wake": "wake",
    "wake_2": "wake 2",
    "wake_cpu": "wake (CPU)",
    "wake_cpu_2": "wake 2 (CPU)",
    "request_cold": "request",
}
#: What ``--json`` has in any case; null where it could not be measured.
PROMISED: Final = ("serve_cold", "llm_cold", "warm_create", "swap", "wake", "request_cold")
#: In the order in which they happen, as far as they do.
PHASES: Final = (
    "process",
    "import",
    "heap",
    "first model",
    "placement",
    "unload",
    "wake",
    "config",
    "executor",
    "device",
    "weights",
    "kv cache",
    "warm-up",
    "http server",
    "pool",
    "first token",
)


def measure_round() -> Round:
    """Each part once, one after the other: nothing of one runs during another."""
    task, other = tasks()
    return {
        "serve_cold": measure_serve(task),
        "llm_cold": measure_llm(task),
        **measure_warm(),
        "request_cold": measure_request(task, other),
    }


def medians(rounds: Sequence[Round]) -> dict[str, Timed]:
    """Of the parts, and of each of their phases by itself."""
    return {part: _median([one[part] for one in rounds]) for part in PARTS if part in rounds[0]}


def _median(times: Sequence[Timed]) -> Timed:
    phases = dict.fromkeys(phase for one in times for phase in one.phases_s)
    return Timed(
        statistics.median(one.seconds for one in times),
        {
            phase: statistics.median(one.phases_s.get(phase, 0.0) for one in times)
            for phase in phases
        },
    )


def summary(found: Round) -> dict[str, float | None]:
    """The figures for ``--json``, in seconds."""
    timed = {part: round(one.seconds, 3) for part, one in found.items() if part != "paid_before"}
    return {**dict.fromkeys(PROMISED), **timed}


def show(found: Round, rounds: int) -> None:
    """Phase by phase, and what follows from it."""
    known = {phase for one in found.values() for phase in one.phases_s}
    rows = [
        (phase, *(_cell(one.phases_s.get(phase)) for one in found.values()))
        for phase in [*PHASES, *sorted(known.difference(PHASES))]
        if phase in known
    ]
    rows.append(("in all", *(_cell(one.seconds) for one in found.values())))
    columns = ["seconds", *(PARTS[part] for part in found)]
    print_table(f"medians of {rounds}", columns, rows)
    s = {part: one.seconds for part, one in found.items()}
    print(f"vllm serve / create: {s['serve_cold'] / s['warm_create']:.1f}")
    print(f"vllm serve / swap: {s['serve_cold'] / s['swap']:.1f}")
    print(f"request - swap: {s['request_cold'] - s['swap']:+.3f} s")
    if "wake" not in s:
        print("wake: not run, there is no GPU; on a CPU memory goes back to the system instead")
    print(machine())


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=5, type=click.IntRange(1), help="Medians are shown.")
@click.option("--quick", is_flag=True, help="One round, for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, in seconds.")
def main(rounds: int, *, quick: bool, as_json: bool) -> None:
    """Time the way to the first token, from nothing and from warm."""
    end_in_order()
    if quick:
        rounds = 1
    found = medians([measure_round() for _ in range(rounds)])
    if as_json:
        print(json.dumps(summary(found)))
    else:
        show(found, rounds)


if __name__ == "__main__":
    main()
