"""The figures of `serving.py --shape` so far, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.machine import machine
from benchmarks.measure import Latencies, print_table
from benchmarks.serving.case import ANSWER_TOKENS, PROMPT_TOKENS, Outcome
from benchmarks.serving.shape import Found, Plan
from benchmarks.serving.sides import OF_ENGINE, STREAMED

#: The sides with their names in the tables, first those with whole answers, then streams.
SIDES: Final = {
    "generate": "LLM.generate",
    "tokenyard": "Tokenyard",
    "serve": "vllm serve",
    "stepped": "stepped in a thread",
    "tokenyard_stream": "Tokenyard, streaming",
    "async": "AsyncLLM",
    "serve_stream": "vllm serve, streaming",
}
#: Ratio -> numerator (Tokenyard's side), denominator and target.
RATIOS: Final = {
    "ratio_to_generate": ("tokenyard", "generate", 0.9),
    "ratio_to_serve": ("tokenyard", "serve", 3.0),
    "ratio_to_stepped": ("tokenyard_stream", "stepped", 0.9),
    "ratio_to_async": ("tokenyard_stream", "async", 1.0),
    "stream_ratio_to_serve": ("tokenyard_stream", "serve_stream", 3.0),
}
UNITS: Final = ("requests_per_s", "tokens_per_s", "cpu_us_per_token")
TIMES: Final = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
BROKER: Final = ("broker_us_per_token", "token_ms", "broker_share", "broker_core_share")
#: Largest share of the broker in a token.
WANTED_BROKER_SHARE: Final = 0.02

Figures = dict[str, Any]
#: The rounds of each side.
BySide = Mapping[str, Sequence[Outcome]]


def summary(found: Found, plan: Plan) -> Figures:
    """The figures for ``--json``, null if not measured, with the reasons in `reasons`."""
    figures: Figures = {"shape": plan.shape.name}
    figures |= {"requests": plan.requests, "concurrent": plan.concurrent, "failed": found.failed}
    figures |= {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS}
    figures["rounds"] = {side: len(outcomes) for side, outcomes in found.full.items()}
    figures |= {"offered_per_s": _rounded(found.offered_per_s)}
    figures |= {"write_s": _rounded(found.write_s)}
    measured = {**speeds(found.full), **_ratios(found), **times(found.paced), **_broker(found)}
    figures |= {name: _rounded(measured.get(name)) for name in _promised()}
    missing = [name for name in _promised() if name not in measured]
    return {**figures, "reasons": {name: _reason(name, found) for name in missing}}


def _promised() -> dict[str, Sequence[str]]:
    """All figures, each with the sides that it needs."""
    return {
        **{f"{prefix(side)}{unit}": (side,) for side in SIDES for unit in UNITS},
        **{name: (ours, theirs) for name, (ours, theirs, _) in RATIOS.items()},
        **{f"{_time_prefix(side)}{kind}": (side,) for side in STREAMED for kind in TIMES},
        **dict.fromkeys(BROKER, ("tokenyard_stream",)),
    }


def _reason(name: str, found: Found) -> str:
    for engine, sides in OF_ENGINE.items():
        if engine in found.failed and set(sides).intersection(_promised()[name]):
            return f"{engine} failed"
    return "not run"


def speeds(outcomes: BySide) -> dict[str, float]:
    """Medians of each side's speeds."""
    return {
        f"{prefix(side)}{unit}": statistics.median(getattr(one, unit) for one in rounds)
        for side, rounds in outcomes.items()
        for unit in UNITS
    }


def _ratios(found: Found) -> dict[str, float]:
    medians = speeds(found.full)
    return {
        name: medians[f"{prefix(ours)}tokens_per_s"] / medians[f"{prefix(theirs)}tokens_per_s"]
        for name, (ours, theirs, _) in RATIOS.items()
        if ours in found.full and theirs in found.full
    }


def times(outcomes: BySide) -> dict[str, float]:
    """Medians of each side's times at an offered load."""
    found: dict[str, float] = {}
    for side, rounds in outcomes.items():
        for what in ("ttft", "itl"):
            for percent in (50, 99):
                values = [
                    Latencies(getattr(one, f"{what}_ms")).percentile(percent) for one in rounds
                ]
                found[f"{_time_prefix(side)}{what}_p{percent}_ms"] = statistics.median(values)
    return found


def _broker(found: Found) -> dict[str, float]:
    """The broker's cost per token streamed at full load.

    Its share of a token is the CPU time of the broker's process per token, divided by the mean
    time between two tokens of a stream, both with all streams running.
    """
    shares = [broker_share(one) for one in found.full.get("tokenyard_stream", ())]
    return {
        name: statistics.median(share[at] for share in shares)
        for at, name in enumerate(BROKER)
        if shares
    }


def broker_share(outcome: Outcome) -> tuple[float, float, float, float]:
    """CPU µs per token, ms from token to token, the first by the second, and share of a core."""
    token_s = outcome.broker_cpu_s / outcome.tokens
    gap_s = statistics.fmean(outcome.itl_ms) / 1000
    return 1e6 * token_s, 1000 * gap_s, token_s / gap_s, outcome.broker_cpu_s / outcome.seconds


def prefix(side: str) -> str:
    """The prefix of the names of a side's speeds."""
    return "" if side == "tokenyard" else f"{side.removeprefix('tokenyard_')}_"


def _time_prefix(side: str) -> str:
    return "" if side == "tokenyard_stream" else f"{side}_"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def show(figures: Mapping[str, Any]) -> None:
    """Print the figures as tables."""
    print_table(
        f"{figures['shape']}, {machine()}: {figures['requests']:,} requests at once, "
        f"{figures['concurrent']} of them run; {PROMPT_TOKENS} tokens in, {ANSWER_TOKENS} out; "
        "medians",
        ("", "requests/s", "tokens/s", "CPU µs/token"),
        [
            (title, *(cell(figures[f"{prefix(side)}{unit}"]) for unit in UNITS))
            for side, title in SIDES.items()
        ],
    )
    print_table(
        "ratios of tokens/s",
        ("", "", "wanted"),
        [
            (f"{SIDES[ours]} / {SIDES[theirs]}", cell(figures[name]), wanted)
            for name, (ours, theirs, wanted) in RATIOS.items()
        ],
    )
    print_table(
        f"streams, {cell(figures['offered_per_s'])} requests/s begin; ms",
        ("", "TTFT p50", "p99", "token to token p50", "p99"),
        time_rows(figures),
    )
    print_table("the broker, streams at full load", ("", ""), list(_broker_rows(figures)))


def time_rows(figures: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """The times of the streams, for a table."""
    return [
        (SIDES[side], *(cell(figures.get(f"{_time_prefix(side)}{kind}")) for kind in TIMES))
        for side in STREAMED
    ]


def _broker_rows(figures: Mapping[str, Any]) -> list[tuple[str, object]]:
    percent = [figures["broker_share"], figures["broker_core_share"]]
    share, core = ("not run" if one is None else f"{100 * one:.3f} %" for one in percent)
    return [
        ("CPU µs/token", cell(figures["broker_us_per_token"])),
        ("token to token, mean ms", cell(figures["token_ms"])),
        (f"share of a token (wanted: under {100 * WANTED_BROKER_SHARE:g} %)", share),
        ("of one core", core),
    ]


def cell(value: float | None) -> object:
    """A figure for a table."""
    return "not run" if value is None else value
