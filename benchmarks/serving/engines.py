"""Plain vLLM, called in the three ways in which programs call it.

The ways: `LLM.generate`, which returns whole answers; its engine stepped in a thread that passes
each token to asyncio; and `AsyncLLM`, whose engine core is a separate process.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvloop
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.serving.case import Load, Outcome, Task, Workload, engine_arguments, faults
from benchmarks.serving.load import Pieces, put_load
from worker.engines.cpu_features import request_amx


def parameters(workload: Workload, task: Task, **changes: Any) -> SamplingParams:
    """The sampling parameters of a request, for vLLM."""
    return SamplingParams(**workload.sampling(), detokenize=task.is_text, **changes)


class Program:
    """A `vllm.LLM` in this process: called with all prompts, or stepped in a thread."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        request_amx()
        self._llm = LLM(**engine_arguments(workload.model))
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def close(self) -> None:
        """Free the engine."""
        self._runner.close()

    def generate(self, load: Load) -> Outcome:
        """Call `LLM.generate` with all prompts."""
        tasks = load.tasks
        began = time.perf_counter()
        answers = self._generate(tasks)
        seconds = time.perf_counter() - began
        tokens = sum(task.tokens for task in tasks)
        return Outcome(seconds, tokens, len(tasks), faults(tasks, answers))

    def _generate(self, tasks: Sequence[Task]) -> list[str | list[int]]:
        prompts: Any = [_prompt(task) for task in tasks]
        params = [parameters(self._workload, task) for task in tasks]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        parts = [output.outputs[0] for output in outputs]
        return [
            part.text if task.is_text else list(part.token_ids)
            for task, part in zip(tasks, parts, strict=True)
        ]

    def stepped(self, load: Load) -> Outcome:
        """Call `LLMEngine.step` in a thread that passes on each token."""
        return self._runner.run(self._stepped(load))

    async def _stepped(self, load: Load) -> Outcome:
        stepper = Stepper(self._llm, self._workload, asyncio.get_running_loop())
        try:
            return await put_load(stepper, load)
        finally:
            stepper.stop()


@dataclass(frozen=True, slots=True)
class _Asked:
    name: str
    task: Task
    pieces: asyncio.Queue[Any]


class Stepper:
    """A thread that steps an engine and passes its outputs to asyncio, with one call per step."""

    def __init__(self, llm: LLM, workload: Workload, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = llm.llm_engine
        self._tokenizer = llm.get_tokenizer()
        self._workload = workload
        self._loop = loop
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._running: dict[str, _Asked] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="stepper", daemon=True)
        self._thread.start()

    async def ask(self, tasks: Sequence[Task]) -> Sequence[Pieces]:
        """See `Source`."""
        asked = [_Asked(f"r{next(self._numbers)}", task, asyncio.Queue()) for task in tasks]
        for one in asked:
            self._running[one.name] = one
            self._inbox.put(one)
        return [_drain(one.pieces) for one in asked]

    def stop(self) -> None:
        """Stop the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            self._take_all()
            if self._engine.has_unfinished_requests():
                self._loop.call_soon_threadsafe(self._hear, self._engine.step())

    def _take_all(self) -> None:
        try:
            self._take(self._inbox.get(block=not self._engine.has_unfinished_requests()))
            while True:
                self._take(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _take(self, asked: _Asked | None) -> None:
        if asked is None:
            self._is_over = True
            return
        task = asked.task
        tokens = task.prompt
        if isinstance(tokens, str):
            tokens = self._tokenizer.encode(tokens)
        prompt: Any = {"type": "token", "prompt_token_ids": tokens}
        params = parameters(self._workload, task, output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(asked.name, prompt, params)

    def _hear(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            asked = self._running[output.request_id]
            asked.pieces.put_nowait(_piece(asked.task, output))
            if output.finished:
                del self._running[output.request_id]
                asked.pieces.put_nowait(None)


async def _drain(pieces: asyncio.Queue[Any]) -> Pieces:
    while (piece := await pieces.get()) is not None:
        yield piece


class Async:
    """An `AsyncLLM`, which streams each token."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._numbers = itertools.count()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._engine = self._runner.run(self._make())

    async def _make(self) -> AsyncLLM:
        arguments = AsyncEngineArgs(
            **engine_arguments(self._workload.model), disable_log_stats=True
        )
        return AsyncLLM.from_engine_args(arguments)

    def close(self) -> None:
        """Stop its process."""
        self._engine.shutdown()
        self._runner.close()

    def streamed(self, load: Load) -> Outcome:
        """Call `generate` once per request."""
        return self._runner.run(put_load(self, load))

    async def ask(self, tasks: Sequence[Task]) -> Sequence[Pieces]:
        """See `Source`."""
        return [self._answer(task) for task in tasks]

    async def _answer(self, task: Task) -> Pieces:
        params = parameters(self._workload, task, output_kind=RequestOutputKind.DELTA)
        name = f"r{next(self._numbers)}"
        prompt: Any = _prompt(task)
        async for output in self._engine.generate(prompt, params, name):
            yield _piece(task, output)


def _prompt(task: Task) -> str | TokensPrompt:
    if isinstance(task.prompt, str):
        return task.prompt
    return TokensPrompt(prompt_token_ids=task.prompt)


def _piece(task: Task, output: Any) -> str | list[int]:
    part = output.outputs[0]
    return str(part.text) if task.is_text else list(part.token_ids)
