"""Streams on a yard whose workers crash, with the times of tokens, ends and crashes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import redis.asyncio

from benchmarks.yard import ServingYard
from tokenyard import AsyncClient
from tokenyard.client.aio import AsyncHandle
from tokenyard.protocol.errors import RequestFailed
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Result
from tokenyard.protocol.worker_info import WorkerInfo, WorkerState, decode_worker

#: Timeout of every wait.
PATIENCE_S: Final = 600.0
_POLL_S: Final = 0.005


@dataclass(slots=True)
class Heard:
    """The readers' record of all streams; times are from `time.perf_counter`."""

    tokens: list[tuple[float, int]] = field(default_factory=list)  # time and number
    ended: dict[str, float] = field(default_factory=dict)  # by request
    results: dict[str, Result] = field(default_factory=dict)
    first: asyncio.Event = field(default_factory=asyncio.Event)  # the first token has arrived

    def rate(self, start: float, end: float) -> float:
        """Tokens per second between two times."""
        return sum(count for at, count in self.tokens if start <= at < end) / (end - start)


async def hear(handle: AsyncHandle, heard: Heard) -> None:
    """Read one stream to its end, failed or not."""
    with suppress(RequestFailed):  # the result reports it too
        async for delta in handle:
            heard.tokens.append((time.perf_counter(), len(delta.tokens)))
            heard.first.set()
    heard.results[handle.id] = await handle.wait(PATIENCE_S)
    heard.ended[handle.id] = time.perf_counter()


class Onlooker:
    """Observes a yard and crashes its workers."""

    def __init__(self, yard: ServingYard) -> None:
        self._keys = Keys(yard.name)
        self._connection = redis.asyncio.Redis.from_url(yard.url, socket_timeout=10.0)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.aclose()

    async def roster(self, state: WorkerState = "ready") -> dict[str, WorkerInfo]:
        """The workers in a state: the serving ones, or those without a model."""
        found: Any = await self._connection.hgetall(self._keys.workers)
        known = {worker.decode(): decode_worker(packed) for worker, packed in found.items()}
        return {worker: info for worker, info in known.items() if info.state == state}

    async def crash(self, worker: str) -> bool:
        """Send SIGSEGV to a worker's process; returns False if it is gone already."""
        info = (await self.roster()).get(worker)
        with suppress(ProcessLookupError):
            if info is not None:
                os.kill(info.pid, signal.SIGSEGV)
                return True
        return False

    async def wait_for(self, count: int, state: WorkerState, without: Sequence[str] = ()) -> None:
        """Wait until so many workers outside ``without`` are in a state; raises `TimeoutError`."""
        until = time.monotonic() + PATIENCE_S
        while len((await self.roster(state)).keys() - set(without)) < count:
            if time.monotonic() > until:
                raise TimeoutError(f"{count} workers were not {state} in {PATIENCE_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def poison(self, client: str, request: str) -> list[str]:
        """Crash each worker that takes the request until the yard gives it up; returns them."""
        crashed: list[str] = []
        ledger = self._keys.ledger(client, request)
        worker: bytes | None
        state: bytes | None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                fields: Any = await self._connection.hmget(ledger, "worker", "state")
                worker, state = fields
                if state is not None and state not in (b"waiting", b"assigned"):
                    return crashed
                name = (worker or b"").decode()
                if name and name not in crashed:
                    await asyncio.sleep(_POLL_S)  # lets its engine admit the request
                    if await self.crash(name):
                        crashed.append(name)
                await asyncio.sleep(_POLL_S)


class Streams:
    """Submits streams of one length."""

    def __init__(self, client: AsyncClient, tokens: int, prompt_ids: int) -> None:
        self._client = client
        self._tokens = tokens
        self._ids = prompt_ids
        self._count = 0
        self._draw = random.Random("pauses")

    def _prompt(self) -> list[int]:
        self._count += 1
        return [1 + (self._count + at) % (self._ids - 1) for at in range(4)]

    async def ask(self, count: int) -> list[AsyncHandle]:
        """Submit ``count`` more streams."""
        return await self._client.submit_many(
            [self._prompt() for _ in range(count)],
            stream=True,
            max_tokens=self._tokens,
            temperature=0.0,
            ignore_eos=True,
        )

    async def keep_up(
        self, count: int, heard: Heard, is_over: asyncio.Event, pause_s: float
    ) -> None:
        """Keep ``count`` streams running until ``is_over`` is set and the last one has ended.

        Each begins after a random pause of ``pause_s`` on average.
        """

        async def follow() -> None:
            while not is_over.is_set():
                if pause_s:
                    await asyncio.sleep(self._draw.expovariate(1 / pause_s))
                (handle,) = await self.ask(1)
                await hear(handle, heard)

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(follow())
