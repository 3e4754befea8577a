"""What does a worker's crash cost the requests that did not cause it?

Two parts. First, SIGSEGV kills a worker during innocent streams: how long until the throughput is
back at 90 %? Second, a poison, which crashes every worker that takes it, comes among innocent
streams: when does the last innocent end, compared with twice the time without a poison plus six
replaced processes, and when is the poison given up? The exit status is not 0 if no crash was seen,
an innocent failed, the poison was not convicted, or a target is missed (with --quick, targets do
not count).

    python -m benchmarks.poison [--engine vllm] [--streams 64] [--workers 2] [--spares 0]
        [--pause-s 0] [--server redis] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.poison_load import PATIENCE_S, Heard, Onlooker, Streams, hear
from benchmarks.progress import publish
from benchmarks.yard import (
    ServerName,
    ServingYard,
    embedded_broker,
    end_in_order,
    simulated_yard,
    vllm_yard,
)
from tokenyard import AsyncClient
from tokenyard.protocol.errors import Code
from tokenyard.protocol.settings import EngineName

ADDER: Final = Path(__file__).parent.parent / "examples" / "arithmetic" / "models" / "adder"
_ADDER_IDS: Final = 12
#: The adder's context is 64 tokens, prompt included.
_ADDER_TOKENS: Final = 50
TARGETS: Final[Mapping[str, float]] = {"throughput_back_s": 3.0, "innocents_done_ratio": 1.0}
#: Share of the throughput before the crash that counts as recovered, over `_WINDOW_S`.
_BACK: Final = 0.9
_WINDOW_S: Final = 1.0
_STEP_S: Final = 0.1
_CRASHES: Final = 6


@dataclass(frozen=True, slots=True)
class Case:
    """The configuration of a run."""

    engine: EngineName
    workers: int
    spares: int  # warm processes that replace those that die
    streams: int  # innocents
    tokens: int  # per stream
    pause_s: float  # mean pause before each stream of the chance crash
    before_s: float  # measurement of the throughput before the crash
    after_s: float  # observation after the replacement of the crashed process


@dataclass(frozen=True, slots=True)
class Crash:
    """The outcome of a crash that no request caused."""

    per_s: float  # tokens per second before it
    back_s: float  # infinite if the throughput never recovered
    restart_s: float  # until a replacement served
    start_s: float  # until a new process was warm or, without spares, served
    again: int  # results that took more than one attempt
    failed: int


@dataclass(frozen=True, slots=True)
class Poison:
    """The outcome of a poison among innocents."""

    undisturbed_s: float
    innocents_done_s: float
    convicted_s: float
    code: str  # of the poison's result
    crashes: int
    again: int
    failed: int


def back_s(heard: Heard, crash: float, per_s: float, end: float) -> float:
    """Seconds from a crash until the throughput recovers; infinite if it never does."""
    steps = int((end - crash - _WINDOW_S) / _STEP_S)
    for step in range(max(0, steps)):
        start = crash + step * _STEP_S
        if heard.rate(start, start + _WINDOW_S) >= _BACK * per_s:
            return step * _STEP_S
    return math.inf


def figures(crash: Crash, poison: Poison, spares: int) -> dict[str, float]:
    """The figures with targets, and those that they derive from.

    Each spare replaces a crashed process once; further crashes wait for a new process.
    """
    ready = min(spares, _CRASHES)
    replaced_s = ready * crash.restart_s + (_CRASHES - ready) * crash.start_s
    allowed_s = 2 * poison.undisturbed_s + replaced_s
    found = {
        "throughput_back_s": crash.back_s,
        "innocents_done_ratio": poison.innocents_done_s / allowed_s,
        "convicted_s": poison.convicted_s,
        "innocents_done_s": poison.innocents_done_s,
        "undisturbed_s": poison.undisturbed_s,
        "restart_s": crash.restart_s,
        "start_s": crash.start_s,
        "crashes": float(poison.crashes),
        "tokens_per_s": crash.per_s,
    }
    return {name: round(value, 3) for name, value in found.items()}


def faults(crash: Crash, poison: Poison, spares: int, *, targets: bool) -> Iterator[str]:
    """Faults of the runs and missed targets, in words."""
    if not crash.again:
        yield "no crash was seen: every stream ended at its first attempt"
    if not poison.crashes or not poison.again:
        yield "the poison crashed nobody"
    for failed, where in ((crash.failed, "the chance crash"), (poison.failed, "the poison")):
        if failed:
            yield f"{failed} innocents failed beside {where}"
    if poison.code != Code.POISONED:
        yield f"the poison ended as {poison.code}"
    found = figures(crash, poison, spares)
    for name, most in TARGETS.items() if targets else ():
        if found[name] > most:
            yield f"{name}: {found[name]} is more than {most}"


async def chance_crash(case: Case, streams: Streams, onlooker: Onlooker) -> Crash:
    """Kill one worker while all workers have running streams."""
    heard, is_over = Heard(), asyncio.Event()
    load = asyncio.create_task(
        streams.keep_up(case.streams * case.workers, heard, is_over, case.pause_s)
    )
    await heard.first.wait()
    await asyncio.sleep(case.before_s + _WINDOW_S)
    victim = min(await onlooker.roster())
    at = time.perf_counter()
    per_s = heard.rate(at - case.before_s, at)
    await onlooker.crash(victim)
    await onlooker.wait_for(case.workers, "ready", [victim])
    restart_s = time.perf_counter() - at
    await onlooker.wait_for(case.spares, "warm")
    start_s = time.perf_counter() - at
    await asyncio.sleep(case.after_s)
    end = time.perf_counter()
    is_over.set()
    await asyncio.wait_for(load, PATIENCE_S)
    return Crash(per_s, back_s(heard, at, per_s, end), restart_s, start_s, *_told(heard))


def _told(heard: Heard) -> tuple[int, int]:
    """Number of results that took several attempts, and of failed results."""
    results = heard.results.values()
    again = sum(one.provenance is not None and one.provenance.attempt > 1 for one in results)
    return again, sum(not one.ok for one in results)


async def poison_among(case: Case, client: AsyncClient, onlooker: Onlooker) -> Poison:
    """Run innocent streams without a poison, then with one among them."""
    streams = _streams(client, case)
    began, heard = time.perf_counter(), Heard()
    handles = await streams.ask(case.streams)
    await asyncio.gather(*(hear(one, heard) for one in handles))
    undisturbed_s = time.perf_counter() - began

    began, heard, last = time.perf_counter(), Heard(), Heard()
    half = case.streams // 2
    handles = await streams.ask(half)
    (poison,) = await streams.ask(1)
    handles += await streams.ask(case.streams - half)
    killing = asyncio.create_task(onlooker.poison(client.client_id, poison.id))
    await asyncio.gather(hear(poison, last), *(hear(one, heard) for one in handles))
    result = last.results[poison.id]
    return Poison(
        undisturbed_s,
        max(heard.ended.values()) - began,
        last.ended[poison.id] - began,
        "completed" if result.ok or result.error is None else result.error.code,
        len(await killing),
        *_told(heard),
    )


def _streams(client: AsyncClient, case: Case) -> Streams:
    return Streams(client, case.tokens, _ADDER_IDS if case.engine == "vllm" else 30_000)


async def _run(yard: ServingYard, case: Case) -> tuple[Crash, Poison]:
    onlooker = Onlooker(yard)
    try:
        await onlooker.wait_for(case.spares, "warm")
        async with AsyncClient(yard.url, yard=yard.name) as client:
            crash = await chance_crash(case, _streams(client, case), onlooker)
            poison = await poison_among(case, client, onlooker)
    finally:
        await onlooker.close()
    return crash, poison


def run(case: Case, server: ServerName, step_s: float) -> tuple[Crash, Poison]:
    """Run both parts on a new yard."""
    places = case.streams + 1  # per worker: the innocents and the poison
    options = ["--spares", str(case.spares)]
    with embedded_broker(server) as broker:
        if case.engine == "vllm":
            options += ["--max-num-seqs", str(places), "--device", "cpu", "--enforce-eager"]
            yard = vllm_yard(broker, "poison", case.workers, ADDER, worker_options=options)
        else:
            options += ["--simulated-step-s", str(step_s)]
            yard = simulated_yard(broker, "poison", case.workers, places, worker_options=options)
        with yard as up:
            return asyncio.run(_run(up, case))


def median(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]}


@click.command(context_settings={"show_default": True})
@click.option("--engine", default="simulated", type=click.Choice(["simulated", "vllm"]))
@click.option(
    "--streams", default=64, type=click.IntRange(4), help="Innocents; places of a worker."
)
@click.option("--workers", default=2, type=click.IntRange(1), help="Workers of the yard.")
@click.option("--spares", default=0, type=click.IntRange(0), help="Further warm processes.")
@click.option("--tokens", default=250, type=click.IntRange(20), help="Tokens of each stream.")
@click.option(
    "--pause-s",
    default=0.0,
    type=click.FloatRange(0),
    help="Mean pause before each stream of the chance crash; 0: all run all the time.",
)
@click.option("--step-s", default=0.04, help="Simulated engine: seconds for each token.")
@click.option("--server", default="valkey", type=click.Choice(["valkey", "redis"]))
@click.option("--rounds", default=1, type=click.IntRange(1), help="Runs; medians are shown.")
@click.option("--quick", is_flag=True, help="Few and short streams; no target counts. For CI.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    engine: EngineName,
    streams: int,
    workers: int,
    spares: int,
    tokens: int,
    pause_s: float,
    step_s: float,
    server: ServerName,
    rounds: int,
    *,
    quick: bool,
    as_json: bool,
) -> None:
    """Crash workers, by chance and by a poison, and see what that costs the innocent."""
    end_in_order()
    if engine == "vllm":
        tokens = min(tokens, _ADDER_TOKENS)
    case = Case(engine, workers, spares, streams, tokens, pause_s, before_s=4.0, after_s=10.0)
    if quick:
        rounds, short = 1, min(tokens, 60)
        case = replace(case, streams=8, tokens=short, before_s=1.0, after_s=3.0)
    runs = [run(case, server, step_s) for _ in range(rounds)]
    found = median([figures(*one, spares) for one in runs])
    title = f"{engine}, {case.streams} innocents; {machine()}"
    publish(found, lambda: print_table(title, ["", ""], found.items()), as_json=as_json)
    wrong = [fault for one in runs for fault in faults(*one, spares, targets=not quick)]
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
