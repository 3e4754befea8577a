"""Puts a load on a source of streamed answers, and records when each piece arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

from benchmarks.serving.case import Load, Outcome, Stream, Task, outcome

Pieces = AsyncIterator[str | list[int]]


class Source(Protocol):
    """Answers requests in pieces."""

    async def ask(self, tasks: Sequence[Task]) -> Sequence[Pieces]:
        """Submit several requests; returns the pieces of each answer, as they arrive."""


async def put_load(source: Source, load: Load) -> Outcome:
    """Submit the requests and read all answers. Times count from when a request was due."""
    streams: list[Stream] = []
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for due_s, burst in _bursts(load):
            due = began + due_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            own = [Stream(due) for _ in burst]
            streams += own
            group.create_task(_hear(source, burst, own))
    return outcome(load.tasks, streams, time.perf_counter() - began)


def _bursts(load: Load) -> Iterator[tuple[float, Sequence[Task]]]:
    if not load.arrivals_s:
        yield 0.0, load.tasks
        return
    for due_s, task in zip(load.arrivals_s, load.tasks, strict=True):
        yield due_s, [task]


async def _hear(source: Source, tasks: Sequence[Task], streams: Sequence[Stream]) -> None:
    answers = await source.ask(tasks)
    pairs = zip(answers, streams, strict=True)
    await asyncio.gather(*(_note(pieces, stream) for pieces, stream in pairs))


async def _note(pieces: Pieces, stream: Stream) -> None:
    async for piece in pieces:
        stream.note(piece, time.perf_counter())
