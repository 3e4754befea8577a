"""Sets the stage for `serving.py` on a CPU: all sides of a workload at the same time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.llama import Shape, model_spec, models_folder, write_llama
from benchmarks.serving.case import ANSWER_TOKENS as LONG_ANSWER_TOKENS
from benchmarks.serving.case import PROMPT_TOKENS, Load, Outcome, Task, Workload, long_workload
from benchmarks.serving.sides import Engine, Side, begin, yard_side
from benchmarks.sums import ADDER, ANSWER_TOKENS, questions
from worker.models import read_models

#: Most workers of a yard here. Each has its threads; one core remains for everything else.
WORKERS: Final = 2
_MODELS: Final = Path(__file__).parents[1] / "models.toml"
#: So that all sides schedule alike: vLLM's defaults depend on the kind of program.
_ALIKE: Final = {"enable_prefix_caching": False, "max_num_batched_tokens": 4096}
_SHAPE: Final = Shape("llama-tiny", 128, 2, 2, 2, 256, 512)


@dataclass(frozen=True, slots=True)
class Stage:
    """The sides of a workload by name, and its tasks."""

    workload: Workload
    tasks: Sequence[Task]
    sides: Mapping[str, Side]

    def load(self, requests: int, *, streams: bool) -> Load:
        """Make a load of ``requests`` requests, with the tasks in turn."""
        return Load.of(self.tasks, requests, streams=streams)

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


def arithmetic_workload() -> tuple[Workload, list[Task]]:
    """Short questions with short answers, as text."""
    model = dataclasses.replace(read_models(_MODELS)[ADDER], engine_args=_ALIKE)
    workload = Workload("arithmetic", "sums, 6 tokens in, 3 or 4 out", model, ANSWER_TOKENS, False)
    return workload, [
        Task(one.prompt, one.answer, len(one.answer) + 1)  # the last is the end token
        for one in questions([ADDER], 1000)
    ]


def counting_workload(models: Path, prompts: int) -> tuple[Workload, list[Task]]:
    """Long prompts and answers, as token ids; the model is written to the folder."""
    model = dataclasses.replace(
        model_spec(_SHAPE, write_llama(_SHAPE, models), 256, gpu=False),
        dtype="float32",
        max_model_len=PROMPT_TOKENS + LONG_ANSWER_TOKENS,
        kv_cache_gib=0.5,  # 256 requests of 640 tokens at 2 KiB take 0.31
        engine_args=_ALIKE,
    )
    return long_workload("long", model), Task.counting(_SHAPE, prompts)


@contextmanager
def arithmetic_stage(engines: Sequence[Engine], workers: int) -> Iterator[Stage]:
    """Set the stage for short questions with short answers."""
    workload, tasks = arithmetic_workload()
    with ExitStack() as stack:
        yield Stage(workload, tasks, _sides(stack, workload, engines, workers))


@contextmanager
def long_stage(engines: Sequence[Engine], workers: int, prompts: int) -> Iterator[Stage]:
    """Set the stage for long prompts and answers."""
    with models_folder() as models, ExitStack() as stack:
        workload, tasks = counting_workload(models, prompts)
        yield Stage(workload, tasks, _sides(stack, workload, engines, workers))


def _sides(
    stack: ExitStack, workload: Workload, engines: Sequence[Engine], workers: int
) -> dict[str, Side]:
    """Start the engines side by side, wait until all are ready, then start a larger yard."""
    begun = [begin(engine, workload, stack) for engine in engines]
    sides = {name: side for ready in begun for name, side in ready().items()}
    if workers > 1:
        sides["workers"] = yard_side(workload, workers, stack)
    return sides
