"""`serving.py --shape`: a Llama of a real size, one side after the other, within a time limit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.device import on_gpu, used_mib, wait_until_free
from benchmarks.llama import SHAPES, Shape, models_folder, shrunken, write_llama
from benchmarks.progress import tell, told
from benchmarks.serving_alone import OF_ENGINE, Engine, alone
from benchmarks.serving_case import Load, Outcome, Task, Workload, poisson
from benchmarks.serving_stage import Side
from worker.models import ModelSpec

PROMPT_TOKENS: Final = 512
ANSWER_TOKENS: Final = 128
MAX_NUM_SEQS: Final = 256
_STREAMED: Final = frozenset({"stepped", "tokenyard_stream", "async", "serve_stream"})
_MAX_MODEL_LEN: Final = 1024
_UTILIZATION: Final = 0.85
_SEED: Final = 6
_WARM_UP: Final = 128
_LEAST_PACED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of each side, and how long all may take."""

    shape: Shape
    requests: int  # at once
    rounds: int
    paced_s: float  # of streams at half load
    limit_s: float
    engines: Sequence[Engine] = tuple(OF_ENGINE)
    on_gpu: bool = True


@dataclass(slots=True)
class Found:
    """What has been measured so far."""

    full: dict[str, list[Outcome]] = field(default_factory=dict)  # by side
    paced: dict[str, list[Outcome]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # last words by engine
    offered_per_s: float | None = None
    write_s: float | None = None  # to make the model, or to find that it is there


def plan_for(name: str, rounds: int, limit_s: float, *, quick: bool) -> Plan:
    """The shape itself on a GPU, and a shrunken one for a rehearsal."""
    if quick:
        shape = shrunken(SHAPES[name])
        return Plan(
            shape=shape,
            requests=16,
            rounds=1,
            paced_s=2.0,
            limit_s=limit_s,
            engines=("program", "tokenyard"),
            on_gpu=on_gpu(),
        )
    return Plan(
        shape=SHAPES[name],
        requests={"1b": 1024, "8b": 256}[name],
        rounds=rounds,
        paced_s=12.0,
        limit_s=limit_s,
        on_gpu=on_gpu(),
    )


def workload_for(plan: Plan, path: str) -> Workload:
    """The model, and how all sides load it: as vLLM does by itself, but for what is named here.

    Those are limits that vLLM chooses by who asks. Prompts come again in each round, so nobody has
    a prefix cache.
    """
    arguments: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 8192}
    if plan.on_gpu:
        arguments["gpu_memory_utilization"] = _UTILIZATION
    model = ModelSpec(
        name=plan.shape.name,
        path=path,
        dtype="bfloat16",
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enforce_eager=not plan.on_gpu,
        kv_cache_gib=0.0 if plan.on_gpu else 0.25,
        engine_args=arguments,
    )
    title = f"{PROMPT_TOKENS} tokens in, {ANSWER_TOKENS} out"
    return Workload(plan.shape.name, title, model, ANSWER_TOKENS, True)


def tasks_for(plan: Plan) -> list[Task]:
    """One for each request of a round."""
    return [
        Task(prompt, plan.shape.answer(prompt[-1], ANSWER_TOKENS), ANSWER_TOKENS)
        for prompt in plan.shape.prompts(plan.requests, PROMPT_TOKENS)
    ]


def measure(plan: Plan, save: Callable[[Found], None]) -> Found:
    """All engines, one after the other; one that fails is noted, and the others have their turn."""
    found, until, before_mib = Found(), time.monotonic() + plan.limit_s, used_mib()
    with models_folder() as models:
        began = time.monotonic()
        workload = workload_for(plan, str(write_llama(plan.shape, models)))
        found.write_s = time.monotonic() - began
        tell(f"{plan.shape.name}: written in {found.write_s:.1f} s")
        run = _Run(plan, tasks_for(plan), found)
        for number, engine in enumerate(plan.engines):
            now = time.monotonic()
            share_s = max(0.0, until - now) / (len(plan.engines) - number)
            try:
                if not share_s:
                    raise TimeoutError(f"not started: the {plan.limit_s:g} s were over")
                wait_until_free(before_mib)
                with alone(engine, workload) as sides:
                    tell(f"{engine}: ready after {time.monotonic() - now:.1f} s")
                    run.measure(sides, now + share_s)
            except Exception as fault:  # noqa: BLE001 - whatever it is, the others have their turn
                found.failed[engine] = told(fault)
                tell(f"{engine}: FAILED: {found.failed[engine]}")
            save(found)
    return found


class _Run:
    """Puts the loads on the sides of one engine."""

    def __init__(self, plan: Plan, tasks: Sequence[Task], found: Found) -> None:
        self._plan = plan
        self._tasks = tasks
        self._found = found

    def measure(self, sides: Mapping[str, Side], until: float) -> None:
        """One round and the streams at half load in any case; further rounds as time is left."""
        for name, side in sides.items():
            side.put(self._load(name, min(_WARM_UP, self._plan.requests)), name)
        began = time.monotonic()
        self._round(sides)
        round_s = time.monotonic() - began
        self._pace(sides)
        for _ in range(1, self._plan.rounds):
            if time.monotonic() + round_s > until:
                tell("no time for another round")
                break
            self._round(sides)

    def _round(self, sides: Mapping[str, Side]) -> None:
        for name, side in sides.items():
            outcome = side.put(self._load(name, self._plan.requests), name)
            self._found.full.setdefault(name, []).append(outcome)
            tell(f"{name}: {outcome.tokens_per_s:,.0f} tokens/s")

    def _pace(self, sides: Mapping[str, Side]) -> None:
        """The same moments for all: at half of what the first side can do."""
        if self._found.offered_per_s is None:
            self._found.offered_per_s = self._found.full[next(iter(sides))][0].requests_per_s / 2
        rate = self._found.offered_per_s
        requests = max(_LEAST_PACED, round(rate * self._plan.paced_s))
        for name in _STREAMED.intersection(sides):
            load = self._load(name, requests, poisson(requests, rate, _SEED))
            outcome = sides[name].put(load, name)
            self._found.paced.setdefault(name, []).append(outcome)
            tell(f"{name}: paced at {rate:.1f} requests/s")

    def _load(self, name: str, requests: int, arrivals_s: Sequence[float] = ()) -> Load:
        tasks = itertools.islice(itertools.cycle(self._tasks), requests)
        return Load(list(tasks), name in _STREAMED, arrivals_s)
