"""Medians, ratios and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gateway.client import Told
from benchmarks.machine import machine
from benchmarks.measure import print_table

#: Two gateways before two workers.
FLEET: Final = "fleet"
#: The sides with their names in the tables.
SIDES: Final = {
    "gateway": "Tokenyard, by HTTP",
    "serve": "`vllm serve`",
    "rust": "`vllm-rs serve`",
    "bridge": "Tokenyard, by `vllm-rs` and a bridge",
}
#: What each ratio should reach, as words.
TARGETS: Final = {
    "ratio_to_serve": "at least 0.95",
    "arithmetic_ratio_to_serve": "at least 0.95",
    "cpu_ratio": "at most 1.1",
    "arithmetic_cpu_ratio": "at most 1.1",
    "ttft_p50_added_ms": "at most 4",
    "ttft_p99_ratio": "at most 1.2",
    "ratio_of_two": "as the workers alone",
}


@dataclass(frozen=True, slots=True)
class Load:
    """One load on one side: what its clients told, and CPU seconds by program."""

    told: Sequence[Told]
    cpu_s: Mapping[str, float]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(one.tokens for one in self.told)

    @property
    def requests_per_s(self) -> float:
        """Answers per second, of all clients."""
        return sum(one.requests for one in self.told) / max(one.seconds for one in self.told)

    @property
    def cpu_us(self) -> dict[str, float]:
        """CPU time of a token in µs, by program."""
        return {name: 1e6 * spent / self.tokens for name, spent in self.cpu_s.items()}


Round = Mapping[str, Load]


def summary(
    full: Sequence[Round], prefix: str = "", *, paced: Sequence[Round] = ()
) -> dict[str, float]:
    """Figures of one workload: medians over the rounds; ratios are those within a round."""
    found = {
        "ratio_to_serve": _ratio(full, _speed, "gateway", "serve"),
        "cpu_ratio": _ratio(full, _cpu_us, "gateway", "serve"),
    }
    for side in full[0]:
        loads = [one[side] for one in full]
        found[f"{side}_requests_per_s"] = statistics.median(map(_speed, loads))
        found[f"{side}_cpu_us"] = statistics.median(map(_cpu_us, loads))
        for program in loads[0].cpu_s:
            spent = [one.cpu_us[program] for one in loads]
            found[f"{side}_cpu_us_{program}"] = statistics.median(spent)
    if "bridge" in full[0]:
        found["bridge_ratio_to_rust"] = _ratio(full, _speed, "bridge", "rust")
        found["bridge_cpu_ratio_to_rust"] = _ratio(full, _cpu_us, "bridge", "rust")
    if paced:
        found |= _times(paced)
    return {prefix + name: value for name, value in found.items()}


def _speed(load: Load) -> float:
    return load.requests_per_s


def _cpu_us(load: Load) -> float:
    return sum(load.cpu_us.values())


def _ratio(
    rounds: Sequence[Round], figure: Callable[[Load], float], ours: str, theirs: str
) -> float:
    return statistics.median(figure(one[ours]) / figure(one[theirs]) for one in rounds)


def _times(rounds: Sequence[Round]) -> dict[str, float]:
    found = {
        f"{side}_{name}": statistics.median(getattr(one[side].told[0], name) for one in rounds)
        for side in rounds[0]
        for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms")
    }
    added = found["gateway_ttft_p50_ms"] - found["serve_ttft_p50_ms"]
    ratio = found["gateway_ttft_p99_ms"] / found["serve_ttft_p99_ms"]
    return {**found, "ttft_p50_added_ms": added, "ttft_p99_ratio": ratio}


def show(figures: Mapping[str, Any], rounds: int, threads: int) -> None:
    """Print the figures as tables."""
    for prefix, title in (("", "512/128"), ("arithmetic_", "sums")):
        if f"{prefix}cpu_ratio" not in figures:
            continue
        print_table(
            f"{title}, streams, all at once; medians of {rounds}",
            ("", "requests/s", "CPU µs/token", "of these, by program"),
            [_speeds(figures, prefix, side) for side in _sides(figures, prefix)],
        )
    print_table(
        f"512/128, {figures['offered_per_s']:.1f} requests/s begin; ms",
        ("", "TTFT p50", "p99", "token to token p50", "start (s)", "resident (MiB)"),
        [
            (
                title,
                *(figures[f"{side}_{name}"] for name in ("ttft_p50_ms", "ttft_p99_ms")),
                figures[f"{side}_itl_p50_ms"],
                *(figures[f"{side}_{name}"] for name in ("start_s", "rss_mib")),
            )
            for side, title in _sides(figures, "").items()
        ],
    )
    rows = [(name, figures[name], wanted) for name, wanted in TARGETS.items() if name in figures]
    print_table("against `vllm serve`", ("", "measured", "wanted"), rows)
    print(
        f"{figures['open_streams']:,} streams on one gateway, {figures['open_streams_peak']:,} of"
        f" them open at one moment: all answered right in {figures['open_streams_s']:.1f} s"
    )
    print(f"{machine()}; threads of each engine: {threads}")


def _sides(figures: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Those that were measured, with their titles."""
    return {one: title for one, title in SIDES.items() if f"{prefix}{one}_cpu_us" in figures}


def _speeds(figures: Mapping[str, Any], prefix: str, side: str) -> tuple[object, ...]:
    own = f"{prefix}{side}_cpu_us"
    programs = ", ".join(
        f"{name.removeprefix(own + '_')} {value:.0f}"
        for name, value in figures.items()
        if name.startswith(f"{own}_")
    )
    return SIDES[side], figures[f"{prefix}{side}_requests_per_s"], figures[own], programs
