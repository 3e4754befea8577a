"""A cold `vllm.LLM` in a new interpreter, to its first token."""

from __future__ import annotations

import json
import time
from typing import Final

from benchmarks.child import run_child
from benchmarks.cold_start.case import Task, Timed, phases
from benchmarks.serving.case import engine_arguments
from benchmarks.sums import ANSWER_TOKENS

#: One process, like Tokenyard's engines; by default vLLM starts one or two more and takes longer.
_ENVIRONMENT: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


def measure_llm(task: Task) -> Timed:
    """Time from the start of the interpreter to the first token."""
    settings = json.dumps(engine_arguments(task.model))
    arguments = [settings, task.prompt, str(ANSWER_TOKENS)]
    began = time.monotonic()
    said = run_child("benchmarks.cold_start.llm_child", arguments, environment=_ENVIRONMENT)
    task.check("vllm.LLM", said["answer"])
    phases_s = phases(began, said["ends"])
    phases_s["executor"] -= sum(said["inner_s"].values())
    return Timed(said["ends"]["first token"] - began, {**phases_s, **said["inner_s"]})
