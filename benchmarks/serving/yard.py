"""All of Tokenyard with real vLLM: client, broker, coordinator, worker."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import uvloop

from benchmarks.serving.case import (
    TIMEOUT_S,
    Load,
    Outcome,
    Task,
    Workload,
    engine_arguments,
    faults,
)
from benchmarks.serving.load import Pieces, put_load
from benchmarks.yard import ServingYard, embedded_broker, serving_yard
from tokenyard import AsyncClient, Client
from tokenyard.client.aio import AsyncHandle
from tokenyard.client.options import SharedOptions
from tokenyard.protocol.replies import Result
from worker.models import ModelSpec

_YARD: Final = "serving"
#: Settings for which the worker has its own options.
_NAMED: Final = frozenset({"model", "served_model_name", "dtype", "max_model_len"})
_NAMED_TOO: Final = frozenset({"max_num_seqs", "enforce_eager"})


class Tokenyard:
    """A yard that serves one workload."""

    def __init__(self, yard: ServingYard, workload: Workload) -> None:
        self.yard = yard
        self._workload = workload

    @property
    def pids(self) -> Sequence[int]:
        """Its process ids, including the client's."""
        return [pid for group in self.yard.pids.values() for pid in group]

    def run(self, load: Load) -> Outcome:
        """Put a load on the yard: whole answers with `Client.map`, streams with `AsyncClient`."""
        if not load.streams:
            return self._map(load)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._stream(load))

    def _map(self, load: Load) -> Outcome:
        tasks = load.tasks
        options = _options(self._workload, tasks[0], streams=False)
        answers: list[str | list[int]] = [""] * len(tasks)
        with Client(self.yard.url, yard=self.yard.name, result_timeout_s=TIMEOUT_S) as client:
            began = time.perf_counter()
            prompts = (task.prompt for task in tasks)
            for number, result in client.map(prompts, window=len(tasks), **options):
                answers[number] = _answer(tasks[number], result)
            seconds = time.perf_counter() - began
        tokens = sum(task.tokens for task in tasks)
        return Outcome(seconds, tokens, len(tasks), faults(tasks, answers))

    async def _stream(self, load: Load) -> Outcome:
        async with AsyncClient(
            self.yard.url, yard=self.yard.name, result_timeout_s=TIMEOUT_S
        ) as client:
            return await put_load(_Asker(client, self._workload), load)


class _Asker:
    """See `Source`."""

    def __init__(self, client: AsyncClient, workload: Workload) -> None:
        self._client = client
        self._workload = workload

    async def ask(self, tasks: Sequence[Task]) -> Sequence[Pieces]:
        """See `Source`."""
        options = _options(self._workload, tasks[0], streams=True)
        prompts = [task.prompt for task in tasks]
        handles = await self._client.submit_many(prompts, **options)
        pairs = zip(tasks, handles, strict=True)
        return [_pieces(task, handle) for task, handle in pairs]


async def _pieces(task: Task, handle: AsyncHandle) -> Pieces:
    async for delta in handle:
        yield (delta.text or "") if task.is_text else delta.tokens


def _options(workload: Workload, task: Task, *, streams: bool) -> SharedOptions:
    return {
        "stream": streams,
        "temperature": 0.0,
        "max_tokens": workload.max_tokens,
        "ignore_eos": workload.ignores_eos,
        "detokenize": task.is_text,
    }


def _answer(task: Task, result: Result) -> str | list[int]:
    if not result.ok:
        return f"{result.status}: {result.error}"
    return (result.text or "") if task.is_text else result.tokens


@contextmanager
def tokenyard(workload: Workload, workers: int) -> Iterator[Tokenyard]:
    """Run a broker with an append-only file, a coordinator, and ``workers`` ready workers."""
    with (
        embedded_broker() as broker,
        serving_yard(broker, _YARD, workers, _worker_options(workload.model)) as yard,
    ):
        yield Tokenyard(yard, workload)


def _worker_options(model: ModelSpec) -> list[str]:
    named = {
        "--model": model.path,
        "--model-name": model.name,
        "--dtype": model.dtype,
        "--max-model-len": model.max_model_len,
        "--max-num-seqs": model.max_num_seqs,
    }
    rest = {
        name: value
        for name, value in engine_arguments(model).items()
        if name not in _NAMED | _NAMED_TOO
    }
    options = [str(each) for option in named.items() for each in option]
    eager = ["--enforce-eager"] if model.enforce_eager else []
    return [*options, *eager, "--engine-args", json.dumps(rest)]
