"""Which policy routes best? Latency, prefix cache hits and balance, on three workloads.

Every policy gets the same workloads on four simulated workers with a speed model and a prefix
cache, and with ``--vllm`` the sessions on two vLLM workers. Every answer is checked.

    python -m benchmarks.routing [--rounds 3] [--vllm] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Final, get_args

import click

from benchmarks.llama import Shape, models_folder, write_llama
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import publish
from benchmarks.routing.loads import Loads, Scale, Session
from benchmarks.routing.run import Figures, Sample, median, run
from benchmarks.routing.run import figures as figures_of
from benchmarks.simulated import simulated_answer
from benchmarks.yard import ServingYard, embedded_broker, end_in_order, simulated_yard, vllm_yard
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.protocol.settings import PolicyName
from tokenyard.protocol.wire import Request, SamplingParams, pack_tokens

POLICIES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)
LOADS: Final = ("uniform", "heavy", "sessions")
WORKERS: Final = 4
MAX_NUM_SEQS: Final = 64
#: Per simulated worker: a prompt of 256 tokens takes 26 ms, a token of an answer 10 ms. Four caches
#: together hold all concurrent conversations, one does not.
SPEED: Final = (
    *("--simulated-prefill-rate", "10000"),
    *("--simulated-step-s", "0.01"),
    *("--simulated-cache-tokens", "16000"),
)
SCALE: Final = Scale(
    vocabulary=32_000,
    longest=8_000,
    rate=75.0,
    heavy_rate=60.0,
    session_rate=9.0,
    turns=6,
    said=150,
    answer=24,
)
VLLM_WORKERS: Final = 2
VLLM_SHAPE: Final = Shape("llama-small", 512, 4, 8, 8, 1024, 512)
VLLM_SCALE: Final = replace(SCALE, vocabulary=VLLM_SHAPE.vocabulary, session_rate=0.8, answer=8)
VLLM_OPTIONS: Final = (
    *("--max-num-seqs", "32", "--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"),
    # Blocks as small as on a GPU; the CPU's default is 128 tokens.
    *("--engine-args", '{"block_size": 32, "kv_cache_memory_bytes": 100663296}'),
)

Measured = Mapping[str, Mapping[str, Figures]]  # by workload and policy
Open = Callable[[EmbeddedBroker, str, PolicyName], AbstractContextManager[ServingYard]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a measurement."""

    requests: int  # per workload
    rounds: int


def answer(prompt: list[int], count: int) -> list[int]:
    """The simulated engine's answer."""
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    request = Request(id="x", tokens=pack_tokens(prompt), params=params)
    return simulated_answer(request, max_model_len=2 * SCALE.longest).tokens


def simulated(
    broker: EmbeddedBroker, name: str, policy: PolicyName
) -> AbstractContextManager[ServingYard]:
    """Run a yard whose workers have the speed model."""
    return simulated_yard(broker, name, WORKERS, MAX_NUM_SEQS, ["--policy", policy], SPEED)


def measure(
    policies: Sequence[PolicyName],
    loads: Mapping[str, Callable[[int], Sequence[Session]]],
    open_yard: Open,
    workers: int,
    rounds: int,
) -> Measured:
    """Measure all policies in turn on each workload; returns the medians of the rounds."""
    found: dict[str, dict[str, list[Figures]]] = {
        load: {policy: [] for policy in policies} for load in loads
    }
    with embedded_broker() as broker:
        for number in range(rounds):
            for load, make in loads.items():
                sessions = make(number)
                for policy in policies:
                    name = f"{load}-{policy}-{number}".replace("_", "-")
                    samples = _one(open_yard(broker, name, policy), sessions)
                    found[load][policy].append(figures_of(samples, workers))
    return {
        load: {policy: median(runs) for policy, runs in by_policy.items()}
        for load, by_policy in found.items()
    }


def _one(opened: AbstractContextManager[ServingYard], sessions: Sequence[Session]) -> list[Sample]:
    with opened as yard:
        gc.collect()
        return asyncio.run(run(yard.url, yard.name, sessions))


def measure_simulated(policies: Sequence[PolicyName], names: Sequence[str], plan: Plan) -> Measured:
    """Measure all workloads on simulated workers."""

    def make(load: str, number: int) -> Sequence[Session]:
        loads = Loads(SCALE, answer, seed=number)
        make_load = {"uniform": loads.uniform, "heavy": loads.heavy, "sessions": loads.sessions}
        return make_load[load](plan.requests)

    makers = {name: (lambda number, name=name: make(name, number)) for name in names}
    return measure(policies, makers, simulated, WORKERS, plan.rounds)


def measure_vllm(policies: Sequence[PolicyName], plan: Plan) -> Measured:
    """Measure the sessions with vLLM's own prefix cache."""
    with models_folder() as models:
        model = write_llama(VLLM_SHAPE, models)

        def opened(
            broker: EmbeddedBroker, name: str, policy: PolicyName
        ) -> AbstractContextManager[ServingYard]:
            options = ["--policy", policy]
            return vllm_yard(broker, name, VLLM_WORKERS, model, options, VLLM_OPTIONS)

        def counted(prompt: list[int], count: int) -> list[int]:
            return VLLM_SHAPE.answer(prompt[-1], count)

        def make(number: int) -> Sequence[Session]:
            return Loads(VLLM_SCALE, counted, seed=number).sessions(plan.requests)

        return measure(policies, {"sessions_on_vllm": make}, opened, VLLM_WORKERS, plan.rounds)


def targets(measured: Measured) -> dict[str, float]:
    """The figures with targets, as ratios to round robin."""
    found: dict[str, float] = {}
    for load, by_policy in measured.items():
        base = by_policy.get("round_robin")
        affine, least = by_policy.get("prefix_affinity"), by_policy.get("least_loaded")
        if base and affine and load.startswith("sessions"):
            found[f"{load}: prefix hits, prefix_affinity"] = affine.hit_rate / base.hit_rate
            found[f"{load}: p99, prefix_affinity"] = affine.p99_ms / base.p99_ms
        if base and least and load == "heavy":
            found["heavy: p99, least_loaded"] = least.p99_ms / base.p99_ms
    return found


def show(measured: Measured, plan: Plan) -> None:
    """Print the tables."""
    columns = ["policy", "mean ms", "p99 ms", "prefix hits", "imbalance"]
    for load, by_policy in measured.items():
        rows = [
            (policy, one.mean_ms, one.p99_ms, f"{one.hit_rate:.1%}", one.imbalance)
            for policy, one in by_policy.items()
        ]
        print_table(f"{load}: {plan.requests:,} requests, medians of {plan.rounds}", columns, rows)
    ratios = [(name, ratio) for name, ratio in targets(measured).items()]
    print_table("by round_robin's", ["", "ratio"], ratios)
    print(machine())


def _chosen(_: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    known = POLICIES if parameter.name == "policies" else LOADS
    names = [name.strip() for name in value.split(",") if name.strip()]
    if unknown := sorted(set(names) - set(known)):
        raise click.BadParameter(f"{', '.join(unknown)}: known are {', '.join(known)}")
    return [one for one in known if one in names]


@click.command(context_settings={"show_default": True})
@click.option("--requests", default=600, type=click.IntRange(100), help="Of each workload.")
@click.option("--rounds", default=3, type=click.IntRange(1), help="Medians are shown.")
@click.option("--policies", default=",".join(POLICIES), callback=_chosen, help="Which of them.")
@click.option("--loads", default=",".join(LOADS), callback=_chosen, help="Which workloads.")
@click.option("--vllm", is_flag=True, help="Also the sessions on vLLM workers.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    requests: int,
    rounds: int,
    policies: list[PolicyName],
    loads: list[str],
    *,
    vllm: bool,
    quick: bool,
    as_json: bool,
) -> None:
    """Compare policies on the same workloads; exit with 1 where an answer is wrong."""
    end_in_order()
    plan = Plan(48, 1) if quick else Plan(requests, rounds)
    chosen, names = policies, loads
    if quick:
        # Most of the time is the start of a yard.
        names, chosen = ["sessions"], [p for p in chosen if p not in ("megatron", "vllm")]
    measured = dict(measure_simulated(chosen, names, plan)) if names else {}
    if vllm:
        measured |= measure_vllm(chosen, replace(plan, requests=min(plan.requests, 400)))
    if not any(measured.values()):
        sys.exit("nothing was measured: name one workload at least, or --vllm, and one policy")
    found = {load: {p: asdict(one) for p, one in each.items()} for load, each in measured.items()}
    figures = {**found, "ratios": targets(measured)}
    publish(figures, lambda: show(measured, plan), as_json=as_json)
    wrong = sum(one.wrong for by_policy in measured.values() for one in by_policy.values())
    if wrong:
        sys.exit(f"{wrong} answers were wrong")


if __name__ == "__main__":
    main()
