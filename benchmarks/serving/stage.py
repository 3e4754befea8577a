"""Starts the sides of `serving.py`, all with the same model and settings."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from benchmarks.cold_start.case import WrongAnswer
from benchmarks.measure import cpu_seconds
from benchmarks.serving import model as serving_model
from benchmarks.serving.case import Load, Outcome, Task, Workload
from benchmarks.serving.child import Child, Kind, Way, engine_child
from benchmarks.serving.http import http_server
from benchmarks.serving.yard import tokenyard
from benchmarks.sums import ADDER, ANSWER_TOKENS, questions
from worker.models import read_models

#: Most workers of a yard here. Each has its threads; one core remains for everything else.
WORKERS: Final = 2
_MODELS: Final = Path(__file__).parents[1] / "models.toml"
#: So that all sides schedule alike: vLLM's defaults depend on the kind of program.
_ALIKE: Final = {"enable_prefix_caching": False, "max_num_batched_tokens": 4096}
#: Of the long workload's prompts, at least one in this many must be clear.
_ONE_CLEAR_OF: Final = 6
#: The ways to call a `vllm.LLM`.
_OF_PROGRAM: Final[tuple[Way, ...]] = ("generate", "stepped")

Run = Callable[[Load], Outcome]


@dataclass(frozen=True, slots=True)
class Side:
    """A way to run a load, and the processes that take part."""

    run: Run
    pids: Sequence[int]
    broker_pids: Sequence[int] = ()  # a part of its processes

    def put(self, load: Load, name: str) -> Outcome:
        """Put a load on this side; raises `WrongAnswer`."""
        pids = {"all": self.pids, "broker": self.broker_pids}
        before = cpu_seconds(pids)
        outcome = self.run(load)
        if outcome.faults:
            raise WrongAnswer(f"{name}: " + "\n".join(outcome.faults))
        spent = {group: now - before[group] for group, now in cpu_seconds(pids).items()}
        return dataclasses.replace(outcome, cpu_s=spent["all"], broker_cpu_s=spent["broker"])


@dataclass(frozen=True, slots=True)
class Stage:
    """The sides of a workload by name, and its tasks."""

    workload: Workload
    tasks: Sequence[Task]
    sides: Mapping[str, Side]

    def load(self, requests: int, *, streams: bool, arrivals_s: Sequence[float] = ()) -> Load:
        """Make a load of ``requests`` requests, with the tasks in turn."""
        tasks = itertools.islice(itertools.cycle(self.tasks), requests)
        return Load(list(tasks), streams, arrivals_s)

    def put(self, side: str, load: Load) -> Outcome:
        """Put a load on one side; raises `WrongAnswer`."""
        return self.sides[side].put(load, f"{self.workload.name}, {side}")


def share_cores() -> int:
    """Give every engine started from now on the same number of threads; returns it.

    The system places the threads. vLLM would pin them, and use one more core when it serves.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, ((cores or 1) - 1) // WORKERS)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return threads


@contextmanager
def arithmetic_stage(parts: Sequence[str]) -> Iterator[Stage]:
    """Set the stage for short questions with short answers, as text."""
    model = dataclasses.replace(read_models(_MODELS)[ADDER], engine_args=_ALIKE)
    workload = Workload("arithmetic", "sums, 6 tokens in, 3 or 4 out", model, ANSWER_TOKENS, False)
    tasks = [
        Task(one.prompt, one.answer, len(one.answer) + 1)  # the last is the end token
        for one in questions([ADDER], 1000)
    ]
    with ExitStack() as stack:
        children = _loading(stack, workload, parts)
        yield Stage(workload, tasks, _started(stack, workload, parts, children))


@contextmanager
def long_stage(parts: Sequence[str], candidates: int) -> Iterator[Stage]:
    """Set the stage for long prompts and answers, as token ids; `LLM.generate` has the right ones.

    Of the ``candidates``, only prompts with clear answers are used: between two equally good
    tokens, the batch in which a request happens to run decides.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenyard-bench-")))
        model = serving_model.write_model(folder)
        title = f"{serving_model.PROMPT_TOKENS} tokens in, {serving_model.ANSWER_TOKENS} out"
        workload = Workload("long", title, model, serving_model.ANSWER_TOKENS, True)
        children = _loading(stack, workload, {"program", *parts})
        sides = _started(stack, workload, parts, children)
        yield Stage(workload, _clear_tasks(children["program"], candidates), sides)


def _clear_tasks(program: Child, candidates: int) -> list[Task]:
    prompts = serving_model.prompts(candidates)
    answers = program.clear_answers(Load([Task(prompt, [], 0) for prompt in prompts]))
    tasks = [
        Task(prompt, answer, len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer
    ]
    if len({tuple(task.answer) for task in tasks}) < candidates // _ONE_CLEAR_OF:
        raise WrongAnswer(f"only {len(tasks)} of {len(prompts)} prompts have clear answers")
    return tasks


def _loading(stack: ExitStack, workload: Workload, parts: Collection[str]) -> dict[Kind, Child]:
    """Start the engines that are called directly; they load concurrently with everything else."""
    kinds: tuple[Kind, ...] = ("program", "async")
    return {
        kind: stack.enter_context(engine_child(kind, workload)) for kind in kinds if kind in parts
    }


def _started(
    stack: ExitStack,
    workload: Workload,
    parts: Collection[str],
    children: Mapping[Kind, Child],
) -> dict[str, Side]:
    """Start the other sides, and wait until all are ready."""
    yard = stack.enter_context(tokenyard(workload, 1))
    for child in children.values():
        child.wait_until_ready()
    sides = dict.fromkeys(("tokenyard", "tokenyard_stream"), Side(yard.run, yard.pids))
    if "program" in children:
        child = children["program"]
        sides |= {way: Side(partial(child.run, way), [child.pid]) for way in _OF_PROGRAM}
    if "async" in children:
        child = children["async"]
        sides["async"] = Side(partial(child.run, "streamed"), family(child.pid))
    if "serve" in parts:
        server = stack.enter_context(http_server(workload))
        server.wait_until_ready()
        pids = [os.getpid(), *family(server.pid)]
        sides |= dict.fromkeys(("serve", "serve_stream"), Side(server.run, pids))
    if "workers" in parts:
        yard = stack.enter_context(tokenyard(workload, WORKERS))
        sides["workers"] = Side(yard.run, yard.pids)
    return sides


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
