"""`serving.py --shape`: a Llama of a real size, within a time limit.

The engines run in waves: those of a wave share the GPU, and idle while another one is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.device import on_gpu, used_mib, wait_until_free
from benchmarks.llama import SHAPES, Shape, model_spec, models_folder, shrunken, write_llama
from benchmarks.progress import tell, told
from benchmarks.serving.case import Load, Outcome, Task, Workload, long_workload
from benchmarks.serving.sides import EVERYBODY, STREAMED, Engine, Ready, Side, begin

_WARM_UP: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The requests to each side, and the time limit of all."""

    shape: Shape
    requests: int  # submitted together
    concurrent: int  # that run at the same time
    rounds: int
    paced_s: float  # duration of the streams at half load
    limit_s: float
    waves: Sequence[Sequence[Engine]] = (EVERYBODY,)
    on_gpu: bool = True


@dataclass(slots=True)
class Found:
    """The measurements so far."""

    full: dict[str, list[Outcome]] = field(default_factory=dict)  # by side
    paced: dict[str, list[Outcome]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # errors by engine
    offered_per_s: float | None = None
    write_s: float | None = None  # to write the model, or to find it


def plan_for(name: str, rounds: int, limit_s: float, *, quick: bool) -> Plan:
    """The plan for a shape; ``quick`` shrinks it for a rehearsal."""
    if quick:
        shape = shrunken(SHAPES[name])
        return Plan(
            shape=shape,
            requests=16,
            concurrent=256,
            rounds=1,
            paced_s=2.0,
            limit_s=limit_s,
            waves=(("program", "tokenyard"),),
            on_gpu=on_gpu(),
        )
    # 80 GB have room for four engines of 256 requests in the 1B shape, two of 192 in the 8B shape.
    is_small = name == "1b"
    return Plan(
        shape=SHAPES[name],
        requests=512 if is_small else 192,
        concurrent=256 if is_small else 192,
        rounds=rounds,
        paced_s=6.0,
        limit_s=limit_s,
        waves=(EVERYBODY,) if is_small else (("program", "tokenyard"), ("serve", "async")),
        on_gpu=on_gpu(),
    )


def workload_for(plan: Plan, path: Path) -> Workload:
    """The model and its sampling."""
    model = model_spec(plan.shape, path, plan.concurrent, gpu=plan.on_gpu)
    return long_workload(plan.shape.name, model)


def measure(plan: Plan, save: Callable[[Found], None]) -> Found:
    """Run all waves in sequence; a wave that would start too late is left out."""
    found, until, before_mib = Found(), time.monotonic() + plan.limit_s, used_mib()
    with models_folder() as models:
        began = time.monotonic()
        workload = workload_for(plan, write_llama(plan.shape, models))
        found.write_s = time.monotonic() - began
        tell(f"{plan.shape.name}: written in {found.write_s:.1f} s")
        tasks = Task.counting(plan.shape, plan.requests)
        run, start_s = _Run(plan, tasks, found, save), 0.0
        for number, wave in enumerate(plan.waves):
            now = time.monotonic()
            if number and now + start_s >= until:
                words = f"not started: the {plan.limit_s:g} s were nearly over"
                found.failed |= dict.fromkeys(wave, words)
                tell(f"{', '.join(wave)}: {words}")
            else:
                wait_until_free(before_mib)
                share_s = (until - now) / (len(plan.waves) - number)
                start_s = run.wave(wave, workload, now + share_s)
            save(found)
    return found


class _Run:
    """Starts the engines of a wave and puts the loads on their sides."""

    def __init__(
        self, plan: Plan, tasks: Sequence[Task], found: Found, save: Callable[[Found], None]
    ) -> None:
        self._plan = plan
        self._tasks = tasks
        self._found = found
        self._save = save

    def wave(self, engines: Sequence[Engine], workload: Workload, until: float) -> float:
        """Run a wave; returns seconds until all were ready. An engine that fails is recorded."""
        began = time.monotonic()
        with ExitStack() as stack:
            begun: dict[Engine, Ready] = {}
            for engine in engines:
                with self._noted(engine):
                    begun[engine] = begin(engine, workload, stack)
            sides: dict[Engine, Mapping[str, Side]] = {}
            # A yard starts when it is waited for, so it comes first, to start beside the others.
            for engine in sorted(begun, key=lambda one: one != "tokenyard"):
                with self._noted(engine):
                    sides[engine] = begun[engine]()
                    tell(f"{engine}: ready after {time.monotonic() - began:.1f} s")
            start_s = time.monotonic() - began
            self._measure({engine: sides[engine] for engine in engines if engine in sides}, until)
        return start_s

    def _measure(self, sides: Mapping[Engine, Mapping[str, Side]], until: float) -> None:
        """Run one round and the streams at half load, then more rounds as time permits."""
        self._each(sides, self._warm_up)
        began = time.monotonic()
        self._each(sides, self._round)
        round_s = time.monotonic() - began
        self._each(sides, self._pace)
        for _ in range(1, self._plan.rounds):
            if time.monotonic() + round_s > until:
                tell("no time for another round")
                break
            self._each(sides, self._round)

    def _each(
        self,
        sides: Mapping[Engine, Mapping[str, Side]],
        put: Callable[[Mapping[str, Side]], None],
    ) -> None:
        for engine, own in sides.items():
            if engine not in self._found.failed:
                with self._noted(engine):
                    put(own)

    @contextmanager
    def _noted(self, engine: Engine) -> Iterator[None]:
        try:
            yield
        except Exception as fault:  # noqa: BLE001 - the other engines run after any failure
            self._found.failed[engine] = told(fault)
            tell(f"{engine}: FAILED: {self._found.failed[engine]}")
            self._save(self._found)

    def _warm_up(self, sides: Mapping[str, Side]) -> None:
        for name, side in sides.items():
            side.put(self._load(name, min(_WARM_UP, self._plan.requests)), name)

    def _round(self, sides: Mapping[str, Side]) -> None:
        for name, side in sides.items():
            outcome = side.put(self._load(name, self._plan.requests), name)
            self._found.full.setdefault(name, []).append(outcome)
            tell(f"{name}: {outcome.tokens_per_s:,.0f} tokens/s")
            self._save(self._found)

    def _pace(self, sides: Mapping[str, Side]) -> None:
        """Put half of the first side's full load on all, with the same arrival times."""
        if self._found.offered_per_s is None:
            self._found.offered_per_s = self._found.full[next(iter(sides))][0].requests_per_s / 2
        rate = self._found.offered_per_s
        load = Load.paced(self._tasks, rate, self._plan.paced_s)
        for name in set(STREAMED).intersection(sides):
            outcome = sides[name].put(load, name)
            self._found.paced.setdefault(name, []).append(outcome)
            tell(f"{name}: paced at {rate:.1f} requests/s")

    def _load(self, name: str, requests: int) -> Load:
        return Load.of(self._tasks, requests, streams=name in STREAMED)
