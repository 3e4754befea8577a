"""One run of `benchmarks.routing`: a workload on a yard, and its figures."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measure import Latencies
from benchmarks.routing.loads import Session, Turn
from tokenyard.client.aio import AsyncClient
from tokenyard.protocol.replies import Result

PATIENCE_S = 120.0
#: Concurrent submissions, each of which takes a connection.
_SUBMITTERS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one request."""

    latency_ms: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int  # input and output
    worker: str
    is_right: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a policy on a workload."""

    mean_ms: float
    p99_ms: float
    hit_rate: float  # share of all prompt tokens found in a prefix cache
    imbalance: float  # tokens that the busiest worker computed, relative to the mean
    wrong: int


async def run(url: str, yard: str, sessions: Sequence[Session]) -> list[Sample]:
    """Run all sessions, each when it is due."""
    samples: list[Sample] = []
    door = asyncio.Semaphore(_SUBMITTERS)
    async with AsyncClient(url, yard, result_timeout_s=PATIENCE_S) as client:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                await asyncio.sleep(max(0.0, began + session.at_s - time.perf_counter()))
                group.create_task(_converse(client, session, door, samples))
    return samples


async def _converse(
    client: AsyncClient, session: Session, door: asyncio.Semaphore, samples: list[Sample]
) -> None:
    for turn in session.turns:
        await asyncio.sleep(turn.think_s)
        began = time.perf_counter()
        async with door:
            handle = await client.submit(
                turn.prompt,
                max_tokens=len(turn.answer),
                temperature=0.0,
                ignore_eos=True,
                session=session.name,
            )
        result = await handle.wait()
        samples.append(_sample(turn, result, (time.perf_counter() - began) * 1000))


def _sample(turn: Turn, result: Result, latency_ms: float) -> Sample:
    cached = (result.usage.cached_tokens if result.usage else 0) or 0
    return Sample(
        latency_ms=latency_ms,
        prompt_tokens=len(turn.prompt),
        cached_tokens=cached,
        computed_tokens=len(turn.prompt) - cached + len(result.tokens),
        worker=result.provenance.worker if result.provenance else "",
        is_right=result.ok and result.tokens == turn.answer,
    )


def figures(samples: Sequence[Sample], workers: int) -> Figures:
    """Compute the figures of one run."""
    computed = Counter[str]()
    for sample in samples:
        computed[sample.worker] += sample.computed_tokens
    prompts = sum(sample.prompt_tokens for sample in samples)
    latencies = Latencies([sample.latency_ms for sample in samples])
    return Figures(
        mean_ms=statistics.fmean(latencies.all_ms),
        p99_ms=latencies.percentile(99),
        hit_rate=sum(sample.cached_tokens for sample in samples) / prompts,
        imbalance=max(computed.values()) * workers / sum(computed.values()),
        wrong=sum(not sample.is_right for sample in samples),
    )


def median(runs: Sequence[Figures]) -> Figures:
    """The medians of several runs, and the total of wrong answers."""
    return Figures(
        mean_ms=statistics.median(one.mean_ms for one in runs),
        p99_ms=statistics.median(one.p99_ms for one in runs),
        hit_rate=statistics.median(one.hit_rate for one in runs),
        imbalance=statistics.median(one.imbalance for one in runs),
        wrong=sum(one.wrong for one in runs),
    )
