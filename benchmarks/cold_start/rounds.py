"""Runs the rounds of `cold_start.py`, part by part, within a time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cold_start.case import Timed, tasks
from benchmarks.cold_start.request import measure_request
from benchmarks.cold_start.serve import measure_llm, measure_serve
from benchmarks.cold_start.warm import measure_warm
from benchmarks.device import used_mib, wait_until_free
from benchmarks.progress import tell, told

Measure = Callable[[], Mapping[str, Timed]]


@dataclass(slots=True)
class Found:
    """The times so far, by part."""

    model: str
    rounds: list[dict[str, Timed]] = field(default_factory=list)
    first: dict[str, Timed] = field(default_factory=dict)  # runs in which vLLM had to compile
    failed: dict[str, str] = field(default_factory=dict)  # errors by part


def measure(
    models: Path,
    *,
    rounds: int,
    limit_s: float | None,
    save: Callable[[Found], None],
) -> Found:
    """Run as many rounds as planned and possible within the limit, at least one."""
    found = Found(Path(tasks(models)[0].model.path).name)
    began, round_s, before_mib = time.monotonic(), 0.0, used_mib()
    parts = _parts(models)
    for number in range(rounds):
        now = time.monotonic()
        if number and limit_s is not None and now + round_s - began > limit_s:
            tell("no time for another round")
            break
        found.rounds.append({})
        _round(parts, found, found.rounds[-1], before_mib, save)
        round_s = time.monotonic() - now
    return found


def compiled() -> set[str]:
    """The names in vLLM's compile cache on this host."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(home, "vllm")) / "torch_compile_cache"
    return {path.name for pattern in ("*", "torch_aot_compile/*") for path in root.glob(pattern)}


def _parts(models: Path) -> Mapping[str, Measure]:
    """The functions that time one or more parts, by the name of the first figure."""
    task, other = tasks(models)
    return {
        "warm_create": lambda: measure_warm(models),
        "request_cold": lambda: {"request_cold": measure_request(models, task, other)},
        "serve_cold": lambda: {"serve_cold": measure_serve(task)},
        "llm_cold": lambda: {"llm_cold": measure_llm(task)},
    }


def _round(
    parts: Mapping[str, Measure],
    found: Found,
    timed: dict[str, Timed],
    before_mib: float,
    save: Callable[[Found], None],
) -> None:
    """Time each part once, in sequence; nothing of one part runs during another.

    A part that fails is recorded and not retried. A part in which vLLM had to compile is timed
    again, so that every figure is with a warm compile cache.
    """
    for part, run in parts.items():
        if part in found.failed:
            continue
        try:
            wait_until_free(before_mib)
            before, result = compiled(), run()
            if compiled() != before:
                found.first |= result
                tell(f"{part}: vLLM has compiled; once more")
                save(found)
                wait_until_free(before_mib)
                result = run()
            timed |= result
        except Exception as fault:  # noqa: BLE001 - the other parts run after any failure
            found.failed[part] = told(fault)
            tell(f"{part}: FAILED: {found.failed[part]}")
        else:
            words = (f"{name} {one.seconds:.3f} s" for name, one in timed.items())
            tell(", ".join(words))
        save(found)
