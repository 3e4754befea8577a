"""The rounds of `cold_start.py`, part by part, within a time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cold_start.case import Timed, tasks
from benchmarks.cold_start.llm import measure_llm
from benchmarks.cold_start.request import measure_request
from benchmarks.cold_start.serve import measure_serve
from benchmarks.cold_start.warm import measure_warm
from benchmarks.device import used_mib, wait_until_free
from benchmarks.progress import tell, told

Measure = Callable[[], Mapping[str, Timed]]


@dataclass(slots=True)
class Found:
    """What has been timed so far, by part."""

    model: str
    rounds: list[dict[str, Timed]] = field(default_factory=list)
    first: dict[str, Timed] = field(default_factory=dict)  # where vLLM had to compile first
    failed: dict[str, str] = field(default_factory=dict)  # last words by part


def measure(
    models: Path,
    *,
    rounds: int,
    limit_s: float | None,
    save: Callable[[Found], None],
) -> Found:
    """As many rounds as are wanted and fit, one at least."""
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
    """What vLLM has compiled on this host so far, by the names in its cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(home, "vllm")) / "torch_compile_cache"
    return {path.name for pattern in ("*", "torch_aot_compile/*") for path in root.glob(pattern)}


def _parts(models: Path) -> Mapping[str, Measure]:
    """What is timed together, under the name of its first figure."""
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
    """Each part once, one after the other: nothing of one runs during another.

    One that fails is noted and not tried again. One in which vLLM had to compile is timed again,
    so that all find their compile cache warm.
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
        except Exception as fault:  # noqa: BLE001 - whatever it is, the others have their turn
            found.failed[part] = told(fault)
            tell(f"{part}: FAILED: {found.failed[part]}")
        else:
            words = (f"{name} {one.seconds:.3f} s" for name, one in timed.items())
            tell(", ".join(words))
        save(found)
