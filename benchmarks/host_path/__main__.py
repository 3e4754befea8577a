"""What does the way to and from the engine cost? The same engine behind Tokenyard, and without it.

Everything is real but the device, which computes nothing and takes the time that a GPU would
(`device.py`). The sides get the same loads: whole answers all at once, streams all at once, and
streams at random moments at half of what the slowest side can stream. Every answer is checked.

    python -m benchmarks.host_path [--step-ms 20] [--rounds 3] [--json] [--quick]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.cold_start.serve import has_rust
from benchmarks.host_path.broker import instructions_per_delta
from benchmarks.host_path.device import Timing, read_timing
from benchmarks.llama import Shape, model_spec, models_folder, write_llama
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import publish, tell
from benchmarks.serving.case import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    Load,
    Outcome,
    Task,
    Workload,
    long_workload,
)
from benchmarks.serving.figures import cell
from benchmarks.serving.sides import OF_ENGINE, Engine, Side, begin
from benchmarks.yard import end_in_order

#: A model without much to load; the device takes the time of a larger one.
SHAPE: Final = Shape("llama-host", 128, 2, 2, 1, 256, 32_000)
SIDES: Final = {
    "generate": "LLM.generate",
    "tokenyard": "Tokenyard",
    "tokenyard_stream": "Tokenyard, streaming",
    "async": "AsyncLLM, streaming",
    "serve_stream": "vllm serve, streaming",
    "rust_stream": "vllm-rs serve, streaming",
}
ENGINES: Final[tuple[Engine, ...]] = ("program", "tokenyard", "async", "serve", "rust")
WHOLE: Final = ("generate", "tokenyard")
_DEVICE: Final = f"{__package__}.device.TimedWorker"
_EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_OFFERED: Final = 0.5
#: Streams of the gateway in whose frames the broker's instructions are counted.
_STREAMS: Final = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a measurement."""

    requests: int
    rounds: int
    paced_s: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one side."""

    outcome: Outcome
    device: Timing

    @property
    def share_waited(self) -> float:
        """The part of the time in which the engine's thread waits for its device."""
        return self.device.waited_s / self.outcome.seconds

    @property
    def share_other(self) -> float:
        """The part in which it neither waits nor is in vLLM's own step."""
        spent = self.device.waited_s + self.device.engine_s
        return 1 - spent / self.outcome.seconds


@dataclass(frozen=True, slots=True)
class Stage:
    """The sides by name, and the files in which their devices report."""

    sides: Mapping[str, Side]
    reports: Mapping[str, Path]

    def put(self, name: str, load: Load) -> Measured:
        """Put a load on one side; raises `WrongAnswer`."""
        before = read_timing(self.reports[name])
        outcome = self.sides[name].put(load, name)
        return Measured(outcome, read_timing(self.reports[name]) - before)


@dataclass(slots=True)
class Report:
    """All rounds, by side."""

    full: dict[str, list[Measured]] = field(default_factory=dict)
    paced: dict[str, list[Measured]] = field(default_factory=dict)
    offered_per_s: float = 0.0


def workload_for(engine: Engine, plan: Plan, path: Path, report: Path) -> Workload:
    """The model on a made-up device, which reports in a file."""
    model = model_spec(SHAPE, path, plan.requests, gpu=False)
    timed = {"step_ms": plan.step_ms, "sequence_us": 0.0, "token_us": 0.0, "report": str(report)}
    arguments = {**model.engine_args, "worker_cls": _DEVICE, "additional_config": {"timed": timed}}
    if engine != "tokenyard":  # on a CPU vLLM gives its worker another process, as not on a GPU
        arguments["distributed_executor_backend"] = _EXECUTOR
    return long_workload("host path", replace(model, engine_args=arguments))


@contextmanager
def stage(plan: Plan) -> Iterator[Stage]:
    """Start all sides beside each other."""
    with models_folder() as models, ExitStack() as stack:
        path = write_llama(SHAPE, models)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenyard-bench-")))
        engines = [one for one in ENGINES if one != "rust" or has_rust()]
        reports = {engine: folder / engine for engine in engines}
        begun = {
            engine: begin(engine, workload_for(engine, plan, path, report), stack)
            for engine, report in reports.items()
        }
        sides: dict[str, Side] = {}
        of_side: dict[str, Path] = {}
        for engine, ready in begun.items():
            found = ready()
            tell(f"{engine}: ready")
            sides |= {name: side for name, side in found.items() if name in SIDES}
            of_side |= dict.fromkeys(OF_ENGINE[engine], reports[engine])
        yield Stage(sides, of_side)


def measure(plan: Plan) -> Report:
    """Put all loads on all sides in turn."""
    report, tasks = Report(), Task.counting(SHAPE, plan.requests)
    with stage(plan) as sides:
        names = [name for name in SIDES if name in sides.sides]
        for round_ in range(-1, plan.rounds):
            for name in names:
                load = Load.of(tasks, plan.requests, streams=name not in WHOLE)
                found = sides.put(name, load)
                if round_ >= 0:  # the one before warms up
                    report.full.setdefault(name, []).append(found)
                    tell(f"{name}: {found.outcome.tokens_per_s:,.0f} tokens/s")
        streamed = [name for name in names if name not in WHOLE]
        slowest = min(
            _median(report.full[name], lambda one: one.requests_per_s) for name in streamed
        )
        report.offered_per_s = _OFFERED * slowest
        load = Load.paced(tasks, report.offered_per_s, plan.paced_s)
        for _ in range(plan.rounds):
            for name in streamed:
                report.paced.setdefault(name, []).append(sides.put(name, load))
    return report


def summary(report: Report, plan: Plan) -> dict[str, Any]:
    """Medians over the rounds; ratios are medians of the rounds' ratios."""
    figures: dict[str, Any] = {"step_ms": plan.step_ms, "requests": plan.requests}
    figures["offered_per_s"] = round(report.offered_per_s, 3)
    for name, rounds in report.full.items():
        figures[f"{name}_tokens_per_s"] = _median(rounds, lambda one: one.tokens_per_s)
        figures[f"{name}_cpu_us_per_token"] = _median(rounds, lambda one: one.cpu_us_per_token)
        figures[f"{name}_engine_waits"] = statistics.median(one.share_waited for one in rounds)
        figures[f"{name}_engine_other_share"] = statistics.median(one.share_other for one in rounds)
    for name, rounds in report.paced.items():
        figures[f"{name}_first_token_ms"] = _median(
            rounds, lambda one: statistics.median(one.ttft_ms)
        )
        figures[f"{name}_between_tokens_ms"] = _median(
            rounds, lambda one: statistics.median(one.itl_ms)
        )
    figures |= {
        "whole_ratio": _ratio(report.full, "tokenyard", "generate"),
        "streams_ratio": _ratio(report.full, "tokenyard_stream", "async"),
        "first_token_later_ms": _later(figures),
        "engine_other_share": figures.get("tokenyard_stream_engine_other_share"),
        "broker_instructions_per_delta": instructions_per_delta("frames", _STREAMS),
        "flat_instructions_per_delta": instructions_per_delta("flat", _STREAMS),
    }
    return {name: None if one is None else round(one, 4) for name, one in figures.items()}


def _median(rounds: Sequence[Measured], of: Callable[[Outcome], float]) -> float:
    return statistics.median(of(one.outcome) for one in rounds)


def _ratio(full: Mapping[str, Sequence[Measured]], ours: str, theirs: str) -> float | None:
    if ours not in full or theirs not in full:
        return None
    pairs = zip(full[ours], full[theirs], strict=True)
    return statistics.median(
        us.outcome.tokens_per_s / them.outcome.tokens_per_s for us, them in pairs
    )


def _later(figures: Mapping[str, Any]) -> float | None:
    ours, theirs = (
        figures.get("tokenyard_stream_first_token_ms"),
        figures.get("async_first_token_ms"),
    )
    return None if ours is None or theirs is None else ours - theirs


def show(figures: Mapping[str, Any]) -> None:
    """Print the figures as tables."""
    kinds = ("tokens_per_s", "cpu_us_per_token", "engine_waits", "engine_other_share")
    print_table(
        f"{figures['requests']} requests at once, {PROMPT_TOKENS} tokens in, {ANSWER_TOKENS} out;"
        f" steps of {figures['step_ms']:g} ms; medians",
        ("", "tokens/s", "CPU µs/token", "engine waits", "neither waits nor steps"),
        [
            (title, *(cell(figures.get(f"{name}_{kind}")) for kind in kinds))
            for name, title in SIDES.items()
        ],
    )
    print_table(
        f"streams, {figures['offered_per_s']:.1f} requests/s begin; ms, medians",
        ("", "first token", "between tokens"),
        [
            (
                title,
                *(
                    cell(figures.get(f"{name}_{kind}"))
                    for kind in ("first_token_ms", "between_tokens_ms")
                ),
            )
            for name, title in SIDES.items()
            if name not in WHOLE
        ],
    )
    print_table(
        "",
        ("", ""),
        [
            ("whole answers, of LLM.generate", cell(figures["whole_ratio"])),
            ("streams, of AsyncLLM", cell(figures["streams_ratio"])),
            ("first token later than of AsyncLLM, ms", cell(figures["first_token_later_ms"])),
            *(
                (f"broker instructions for a delta of one token, {title}", cell(figures[name]))
                for name, title in (
                    ("broker_instructions_per_delta", f"{_STREAMS} streams in frames"),
                    ("flat_instructions_per_delta", f"{_STREAMS} streams of their own"),
                )
            ),
        ],
    )
    print(machine())


@click.command(context_settings={"show_default": True})
@click.option("--step-ms", default=20.0, type=click.FloatRange(0.1), help="Time of a step.")
@click.option("--rounds", default=3, type=click.IntRange(1), help="Medians are shown.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(step_ms: float, rounds: int, *, quick: bool, as_json: bool) -> None:
    """Compare the way to and from the engine with and without Tokenyard, on a made-up device."""
    end_in_order()
    plan = Plan(256, rounds, 20.0, step_ms)
    if quick:
        plan = Plan(16, 1, 2.0, step_ms)
    figures = summary(measure(plan), plan)
    publish(figures, lambda: show(figures), as_json=as_json)


if __name__ == "__main__":
    main()
