"""Generates a load on a live yard through the public client."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tokenyard import clock
from tokenyard.cli.bench.measures import BenchResult, Sample
from tokenyard.client.aio import AsyncClient
from tokenyard.client.handshake import YardInfo
from tokenyard.client.options import SharedOptions
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.keys import PriorityClass

#: Vocabulary if no worker reports its size.
_FEW_TOKENS: Final = 100
#: Short, because the results are not read again.
_RESULT_TTL_S: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """The requests of a run and their rate."""

    requests: int
    rate: float  # average requests/s, at random times; 0: as concurrency allows
    concurrency: int  # most requests in flight; 0: no limit
    prompt_tokens: int
    max_tokens: int
    model: str
    streams: bool
    ignores_eos: bool
    priority: PriorityClass
    seed: int
    warm_up: int  # requests before the measurement
    timeout_s: float  # without progress of a request

    @property
    def options(self) -> SharedOptions:
        """The options of all requests."""
        named: SharedOptions = {"model": self.model} if self.model else {}
        return {
            **named,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignores_eos,
            "temperature": 0.0,
            "stream": self.streams,
            "priority_class": self.priority,
            "result_ttl_s": _RESULT_TTL_S,
            # An interrupted run must not leave load behind.
            "cancel_on_disconnect": True,
        }


class LoadGenerator:
    """Puts a load on a yard and collects samples."""

    def __init__(
        self, url: str, yard: str, load: BenchLoad, on_sample: Callable[[Sample], None]
    ) -> None:
        self.samples: list[Sample] = []
        self.model = load.model
        self._url = url
        self._yard = yard
        self._load = load
        self._on_sample = on_sample
        self._random = random.Random(load.seed)
        self._began = 0.0
        self._took_s = 0.0

    @property
    def measured(self) -> BenchResult:
        """The result so far."""
        took_s = self._took_s or (clock.monotonic() - self._began if self._began else 0.0)
        return BenchResult(self.samples, took_s)

    async def run(self) -> BenchResult:
        """Warm up and measure; raises `TokenyardError` if the yard cannot be used."""
        async with AsyncClient(
            self._url, self._yard, result_timeout_s=self._load.timeout_s
        ) as client:
            info = await client.info()
            self.model = self._load.model or info.default_model
            prompts = self._prompts(_vocabulary(info, self.model))
            for _ in range(self._load.warm_up):
                handle = await client.submit(next(prompts), **self._load.options)
                await handle.result()
            self._began = clock.monotonic()
            async with asyncio.TaskGroup() as group:
                room = asyncio.Semaphore(self._load.concurrency or self._load.requests)
                async for _ in self._starts():
                    await room.acquire()
                    group.create_task(self._measure(client, next(prompts), room))
            self._took_s = clock.monotonic() - self._began
        return self.measured

    def _prompts(self, vocabulary: int) -> Iterator[list[int]]:
        """Random tokens, so that prompts share no prefix."""
        while True:
            yield [self._random.randrange(vocabulary) for _ in range(self._load.prompt_tokens)]

    async def _starts(self) -> AsyncIterator[None]:
        """The start times of requests: with a rate, a Poisson process."""
        due = clock.monotonic()
        for _ in range(self._load.requests):
            if self._load.rate:
                await clock.pause(max(0.0, due - clock.monotonic()))
                due += self._random.expovariate(self._load.rate)
            yield

    async def _measure(
        self, client: AsyncClient, prompt: list[int], room: asyncio.Semaphore
    ) -> None:
        with contextlib.ExitStack() as after:
            after.callback(room.release)
            sample = await self._run_request(client, prompt)
        self.samples.append(sample)
        self._on_sample(sample)

    async def _run_request(self, client: AsyncClient, prompt: list[int]) -> Sample:
        began, first = clock.monotonic(), None
        try:
            handle = await client.submit(prompt, **self._load.options)
            if self._load.streams:
                async for _ in handle:
                    first = first or clock.monotonic()
            result = await handle.wait()
        except TokenyardError as error:
            return Sample(error=type(error).__name__)
        if not result.ok:
            return Sample(error=result.error.code if result.error else result.status)
        ended = clock.monotonic()
        return Sample(
            input_tokens=len(prompt),
            output_tokens=result.usage.completion_tokens if result.usage else len(result.tokens),
            latency_s=ended - began,
            ttft_s=None if first is None else first - began,
        )


def _vocabulary(info: YardInfo, model: str) -> int:
    """The size of the smallest vocabulary among the workers of a model."""
    known = [one.vocab_size for one in info.workers.values() if one.model == model]
    return min((size for size in known if size), default=_FEW_TOKENS)
