"""How long does the first token take? Cold, with a warm process, and through a whole yard.

Cases, with the same model and settings: a cold `vllm serve`, a cold `vllm.LLM`, a load in a warm
process, a swap of two models, waking from sleep, and a request for a model that no worker holds.
Every answer is checked. The model is an arithmetic one on a CPU (`benchmarks/models.toml`), and a
Llama of 1B shape on a GPU.

    python -m benchmarks.cold_start [--model 1b] [--rounds 5] [--json] [--quick]
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from benchmarks.cold_start.case import Timed
from benchmarks.cold_start.models import Size, sized_models
from benchmarks.cold_start.rounds import Found, measure
from benchmarks.device import on_gpu
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import exit_if_failed, limit_option, publish, save
from benchmarks.yard import end_in_order

Round = Mapping[str, Timed]

#: The timed parts, with their names in the table.
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
#: The figures that ``--json`` always has; null if not measured.
PROMISED: Final = ("serve_cold", "llm_cold", "warm_create", "swap", "wake", "request_cold")
#: In chronological order; a part has some of them.
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


def medians(rounds: Sequence[Round]) -> dict[str, Timed]:
    """The medians of the parts, and of each phase separately."""
    times = {part: [one[part] for one in rounds if part in one] for part in PARTS}
    return {part: _median(timed) for part, timed in times.items() if timed}


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


def report(found: Found) -> dict[str, Any]:
    """The object for ``--json``: figures, null if not measured, with the reasons in `reasons`."""
    figures = summary(medians(found.rounds))
    said = {part: _reason(part, found) for part, one in figures.items() if one is None}
    if not on_gpu() and "wake" in said:
        said["wake"] = "there is no GPU"
    return {
        **figures,
        "first_round": summary(found.first) if found.first else None,
        "model": found.model,
        "rounds": len(found.rounds),
        "failed": found.failed,
        "reasons": said,
    }


def _reason(part: str, found: Found) -> str:
    """Why a figure is missing; those of a warm process are timed together."""
    together = part if part in {"serve_cold", "llm_cold", "request_cold"} else "warm_create"
    return f"{together} failed" if together in found.failed else "not run"


def show(found: Round, title: str) -> None:
    """Print the phases and the derived figures."""
    known = {phase for one in found.values() for phase in one.phases_s}
    rows = [
        (phase, *(_cell(one.phases_s.get(phase)) for one in found.values()))
        for phase in [*PHASES, *sorted(known.difference(PHASES))]
        if phase in known
    ]
    rows.append(("in all", *(_cell(one.seconds) for one in found.values())))
    columns = ["seconds", *(PARTS[part] for part in found)]
    print_table(title, columns, rows)
    s = {part: one.seconds for part, one in found.items()}
    for part in ("warm_create", "swap"):
        if {"serve_cold", part} <= s.keys():
            print(f"vllm serve / {PARTS[part]}: {s['serve_cold'] / s[part]:.1f}")
    if {"request_cold", "swap"} <= s.keys():
        print(f"request - swap: {s['request_cold'] - s['swap']:+.3f} s")
    if not on_gpu():
        print("wake: not run, there is no GPU; on a CPU memory goes back to the system instead")


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


@click.command(context_settings={"show_default": True})
@click.option(
    "--model",
    "size",
    type=click.Choice(["arithmetic", "1b"]),
    help="What is loaded: the arithmetic models, or Llamas of 1B shape."
    "  [default: arithmetic on a CPU, 1b on a GPU]",
)
@click.option("--rounds", default=5, type=click.IntRange(1), help="Medians are shown.")
@limit_option("On a GPU: no round but the first begins that would end later.")
@click.option("--quick", is_flag=True, help="One round, for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, in seconds.")
def main(size: Size | None, rounds: int, limit_s: float, *, quick: bool, as_json: bool) -> None:
    """Time the way to the first token, from nothing and from warm."""
    end_in_order()
    size = size or ("1b" if on_gpu() else "arithmetic")
    with sized_models(size, quick=quick) as models:
        found = measure(
            models,
            rounds=1 if quick else rounds,
            limit_s=limit_s if on_gpu() else None,
            save=lambda so_far: save(report(so_far)),
        )
    title = f"{found.model}, {machine()}: medians of {len(found.rounds)}"
    publish(report(found), lambda: show(medians(found.rounds), title), as_json=as_json)
    exit_if_failed(found.failed)


if __name__ == "__main__":
    main()
