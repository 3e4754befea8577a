"""A load on a live yard: requests as fast as asked, through the public client alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tokenyard.cli.bench.measures import Measured, Sample
from tokenyard.client.aio import AsyncClient
from tokenyard.client.handshake import YardInfo
from tokenyard.client.options import SharedOptions
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.keys import PriorityClass

#: Where no worker says how many tokens it knows.
_FEW_TOKENS: Final = 100
#: Nobody reads the results again.
_RESULT_TTL_S: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to ask, and how fast."""

    requests: int
    rate: float  # requests/s that begin, at random moments; 0: as soon as there is room
    concurrency: int  # most requests under way; 0: no bound
    prompt_tokens: int
    max_tokens: int
    model: str
    streams: bool
    ignores_eos: bool
    priority: PriorityClass
    seed: int
    warm_up: int  # requests before, which are not measured
    timeout_s: float  # without news of a request

    @property
    def options(self) -> SharedOptions:
        """What all requests have in common."""
        named: SharedOptions = {"model": self.model} if self.model else {}
        return {
            **named,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignores_eos,
            "temperature": 0.0,
            "stream": self.streams,
            "priority_class": self.priority,
            "result_ttl_s": _RESULT_TTL_S,
            # What is interrupted should not burden the yard any longer.
            "cancel_on_disconnect": True,
        }


class Generator:
    """Puts one load on a yard; `samples` grows meanwhile."""

    def __init__(
        self, url: str, yard: str, load: Load, on_sample: Callable[[Sample], None]
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
    def measured(self) -> Measured:
        """What there is until now."""
        took_s = self._took_s or (time.perf_counter() - self._began if self._began else 0.0)
        return Measured(self.samples, took_s)

    async def run(self) -> Measured:
        """Warm up and measure. Raises `TokenyardError` where nobody is there to be measured."""
        async with AsyncClient(
            self._url, self._yard, result_timeout_s=self._load.timeout_s
        ) as client:
            info = await client.info()
            self.model = self._load.model or info.default_model
            prompts = self._prompts(_vocabulary(info, self.model))
            for _ in range(self._load.warm_up):
                handle = await client.submit(next(prompts), **self._load.options)
                await handle.result()
            self._began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                room = asyncio.Semaphore(self._load.concurrency or self._load.requests)
                async for _ in self._beginnings():
                    await room.acquire()
                    group.create_task(self._measure(client, next(prompts), room))
            self._took_s = time.perf_counter() - self._began
        return self.measured

    def _prompts(self, vocabulary: int) -> Iterator[list[int]]:
        """Random tokens, so that no prompt shares a prefix with another one by design."""
        while True:
            yield [self._random.randrange(vocabulary) for _ in range(self._load.prompt_tokens)]

    async def _beginnings(self) -> AsyncIterator[None]:
        """The moments at which a request begins: with a rate, a Poisson process."""
        due = time.perf_counter()
        for _ in range(self._load.requests):
            if self._load.rate:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                due += self._random.expovariate(self._load.rate)
            yield

    async def _measure(
        self, client: AsyncClient, prompt: list[int], room: asyncio.Semaphore
    ) -> None:
        with contextlib.ExitStack() as after:
            after.callback(room.release)
            sample = await self._ask(client, prompt)
        self.samples.append(sample)
        self._on_sample(sample)

    async def _ask(self, client: AsyncClient, prompt: list[int]) -> Sample:
        began, first = time.perf_counter(), None
        try:
            handle = await client.submit(prompt, **self._load.options)
            if self._load.streams:
                async for _ in handle:
                    first = first or time.perf_counter()
            result = await handle.wait()
        except TokenyardError as fault:
            return Sample(error=type(fault).__name__)
        if not result.ok:
            return Sample(error=result.error.code if result.error else result.status)
        ended = time.perf_counter()
        return Sample(
            input_tokens=len(prompt),
            output_tokens=result.usage.completion_tokens if result.usage else len(result.tokens),
            latency_s=ended - began,
            ttft_s=None if first is None else first - began,
        )


def _vocabulary(info: YardInfo, model: str) -> int:
    """Tokens that each worker of the model knows."""
    known = [one.vocab_size for one in info.workers.values() if one.model == model]
    return min((size for size in known if size), default=_FEW_TOKENS)
