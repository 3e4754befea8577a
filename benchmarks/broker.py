"""How much does the broker cost? Requests per second, added latency and CPU time per request.

A client, a coordinator and two simulated workers of unlimited speed run with every guarantee on an
embedded Valkey with an append-only file. The same run measures the raw limit: the same three hops
with plain redis-py (`benchmarks.raw`). Each request has 128 prompt tokens and 32 result tokens;
every answer is checked.

    python -m benchmarks.broker [--json] [--quick]
"""

from __future__ import annotations

import random
import secrets
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import click

from benchmarks import raw
from benchmarks.measure import (
    Latencies,
    Throughput,
    flowing,
    measure_throughput,
    paced,
    print_table,
)
from benchmarks.progress import publish
from benchmarks.simulated import simulated_answer
from benchmarks.yard import ServingYard, embedded_broker, simulated_yard
from tokenyard import Client, Handle
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.protocol.wire import Request, SamplingParams, pack_tokens

PROMPT_TOKENS = 128
RESULT_TOKENS = 32
WORKERS = 2
WINDOW = 2048
#: Distinct prompts; few, so that checking an answer costs less than getting it.
PROMPTS = 64
RATE = 100.0
#: Longest wait for one answer.
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a round."""

    requests: int
    paced_requests: int

    def flow(self, rate: float) -> int:
        """Number of requests that take as long at ``rate`` as the paced requests do."""
        return max(self.paced_requests, int(rate * self.paced_requests / RATE))


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of one side."""

    throughput: Throughput
    latency: Latencies  # at `RATE`, one at a time
    half: Latencies  # at half of Tokenyard's throughput in that round


#: The measures of a round, for both sides.
MEASURES: Final[dict[str, Callable[[Round], float]]] = {
    "requests_per_s": lambda one: one.throughput.per_s,
    "p50_ms": lambda one: one.latency.percentile(50),
    "p99_ms": lambda one: one.latency.percentile(99),
    "half_p50_ms": lambda one: one.half.percentile(50),
    "half_p99_ms": lambda one: one.half.percentile(99),
}


def prompts() -> list[list[int]]:
    """Distinct prompts, the same in each run."""
    draw = random.Random(128)
    return [[draw.randrange(32_000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def expected(prompt: list[int]) -> list[int]:
    """The simulated engine's answer."""
    params = SamplingParams(max_tokens=RESULT_TOKENS)
    return simulated_answer(Request(id="x", tokens=pack_tokens(prompt), params=params)).tokens


class Checked:
    """Sends requests to the yard and checks every answer."""

    def __init__(self, client: Client, answers: Sequence[list[int]] = ()) -> None:
        self._client = client
        self._prompts = prompts()
        self._answers = answers or [expected(prompt) for prompt in self._prompts]
        self._under_way: SimpleQueue[tuple[int, Handle]] = SimpleQueue()

    def many(self, requests: int, window: int = WINDOW) -> int:
        """Send requests with at most ``window`` under way; returns their number."""
        asked: Iterator[list[int]] = (self._prompts[at % PROMPTS] for at in range(requests))
        count = 0
        results = self._client.map(asked, window=window, max_tokens=RESULT_TOKENS)
        for number, result in results:
            self._check(number, result.tokens)
            count += 1
        if count != requests:
            sys.exit(f"{count} of {requests} requests were answered")
        return count

    def one(self, number: int) -> None:
        """Send one request and wait for its answer."""
        prompt = self._prompts[number % PROMPTS]
        result = self._client.submit(prompt, max_tokens=RESULT_TOKENS).result(PATIENCE_S)
        self._check(number, result.tokens)

    def start(self, numbers: range) -> None:
        """Send several requests without waiting."""
        prompts = [self._prompts[number % PROMPTS] for number in numbers]
        for pair in zip(
            numbers, self._client.submit_many(prompts, max_tokens=RESULT_TOKENS), strict=True
        ):
            self._under_way.put(pair)

    def next(self) -> list[int]:
        """Wait for the next answers to started requests; returns their numbers."""
        number, handle = self._under_way.get(timeout=PATIENCE_S)
        self._check(number, handle.result(PATIENCE_S).tokens)
        return [number]

    def _check(self, number: int, tokens: list[int]) -> None:
        if tokens != self._answers[number % PROMPTS]:
            sys.exit(f"request {number}: wrong answer {tokens}")


def measure_yard(yard: ServingYard, plan: Plan) -> Round:
    """Measure Tokenyard, with every guarantee."""
    with Client(yard.url, yard=yard.name) as client:
        checked = Checked(client)
        checked.many(min(plan.requests, 2000))  # warm-up
        throughput = measure_throughput(yard.pids, lambda: checked.many(plan.requests))
        latency = paced(plan.paced_requests, RATE, checked.one)
        rate = throughput.per_s / 2
        half = flowing(plan.flow(rate), rate, checked.start, checked.next)
        return Round(throughput, latency, half)


def measure_raw(broker: EmbeddedBroker, plan: Plan, rate: float) -> Round:
    """Measure plain redis-py, without guarantees; ``rate`` is half of Tokenyard's throughput."""
    payload = pack_tokens(prompts()[0])
    url, run = broker.url, secrets.token_hex(4)
    return Round(
        raw.throughput(url, f"{run}t", plan.requests, payload, WINDOW, broker.pid),
        raw.latency(url, f"{run}l", plan.paced_requests, payload, RATE),
        raw.flow(url, f"{run}h", plan.flow(rate), payload, rate),
    )


def summary(ours: list[Round], theirs: list[Round]) -> dict[str, float]:
    """The figures: medians over the rounds."""
    figures: dict[str, float] = {}
    for name, value in MEASURES.items():
        figures[name] = statistics.median(map(value, ours))
        figures[f"raw_{name}"] = statistics.median(map(value, theirs))
        ratios = [value(a) / value(b) for a, b in zip(ours, theirs, strict=True)]
        figures[f"{name}_to_raw"] = statistics.median(ratios)
    figures["ratio_to_raw"] = figures.pop("requests_per_s_to_raw")
    figures["half_rate"] = figures["requests_per_s"] / 2
    for prefix, rounds in (("cpu_us", ours), ("raw_cpu_us", theirs)):
        for name in rounds[0].throughput.cpu_s:
            used = [one.throughput.cpu_us(name) for one in rounds]
            figures[f"{prefix}_{name}"] = statistics.median(used)
    return {name: round(value, 3) for name, value in figures.items()}


def show(figures: dict[str, float], requests: int, rounds: int) -> None:
    """Print the figures as a table."""
    half = f"{figures['half_rate']:,.0f}/s"
    rows = [("requests/s", figures["requests_per_s"], figures["raw_requests_per_s"])]
    rows += [
        (f"{name} ms at {rate}", figures[f"{key}_ms"], figures[f"raw_{key}_ms"])
        for rate, keys in ((f"{RATE:g}/s", ("p50", "p99")), (half, ("half_p50", "half_p99")))
        for name, key in zip(("p50", "p99"), keys, strict=True)
    ]
    for name, middle in (
        ("client", "client"),
        ("coordinator", "router"),
        ("workers", "workers"),
        ("broker", "broker"),
    ):
        rows.append(
            (
                f"CPU µs/request, {name}",
                figures[f"cpu_us_{name}"],
                figures[f"raw_cpu_us_{middle}"],
            )
        )
    print_table(
        f"{requests:,} requests, {PROMPT_TOKENS} tokens in, {RESULT_TOKENS} out, "
        f"{WORKERS} simulated workers; medians of {rounds}",
        ("", "Tokenyard", "raw three hops"),
        rows,
    )
    print(
        f"Tokenyard / raw: requests/s {figures['ratio_to_raw']:.2f}; at {RATE:g}/s"
        f" p50 {figures['p50_ms_to_raw']:.2f}, p99 {figures['p99_ms_to_raw']:.2f}; at {half}"
        f" p50 {figures['half_p50_ms_to_raw']:.2f}, p99 {figures['half_p99_ms_to_raw']:.2f}"
    )


@click.command(context_settings={"show_default": True})
@click.option("--requests", default=30_000, help="Requests of one throughput measurement.")
@click.option("--paced-requests", default=500, help="Requests of one latency measurement.")
@click.option("--rounds", default=3, help="Measurements of each side, in turn; medians are shown.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(requests: int, paced_requests: int, rounds: int, quick: bool, as_json: bool) -> None:
    """Measure what the broker adds, against the raw limit of the same three hops."""
    if quick:
        requests, paced_requests, rounds = 3_000, 100, 1
    plan = Plan(requests, paced_requests)
    ours, theirs = [], []
    with (
        embedded_broker() as broker,
        simulated_yard(broker, "bench", WORKERS, max_num_seqs=WINDOW) as yard,
    ):
        for _ in range(rounds):
            ours.append(measure_yard(yard, plan))
            theirs.append(measure_raw(broker, plan, ours[-1].throughput.per_s / 2))
    figures = summary(ours, theirs)
    publish(figures, lambda: show(figures, requests, rounds), as_json=as_json)


if __name__ == "__main__":
    main()
